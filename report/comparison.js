const main = document.querySelector("main");
document.addEventListener("mouseover", ({target}) => {
  const run = target.closest(".run");
  document.querySelectorAll(".run.on").forEach(other => other.classList.remove("on"));
  main.classList.toggle("chosen", run !== null);
  if (run) document.querySelectorAll("." + run.classList[1]).forEach(part => part.classList.add("on"));
});
const cell = (row, column) => row.cells[column].textContent.replaceAll(",", "");
// A duration, such as 2d 4:00:00, in seconds.
const value = text => /^(\d+d )?[\d:]+:\d\d$/.test(text)
  ? text.split(/d |:/).reduce((sum, part, i, all) => sum * (all.length - i === 3 ? 24 : 60) + +part, 0) : text;
const missing = text => text === "" || text === "nan";  // last in both orders
const order = (a, b, sign) =>
  missing(a) - missing(b) || sign * (value(a) - value(b) || a.localeCompare(b, "en", {numeric: true}));
const heads = document.querySelectorAll(".runs [scope=col]");
heads.forEach((head, column) => {
  const button = document.createElement("button");
  button.append(...head.childNodes); head.append(button);
  button.onclick = () => {
    const rows = [...document.querySelectorAll("tr.run")];
    head.sign = -(head.sign || -1);
    heads.forEach(other => other.removeAttribute("aria-sort"));
    head.ariaSort = head.sign > 0 ? "ascending" : "descending";
    rows.sort((a, b) => order(cell(a, column), cell(b, column), head.sign));
    rows.forEach(row => row.parentNode.append(row));
  };
});
