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
const order = (a, b, sign) =>
  (a === "") - (b === "") || sign * (value(a) - value(b) || a.localeCompare(b, "en", {numeric: true}));
document.querySelectorAll(".runs th").forEach((head, column) => {
  head.tabIndex = 0;
  head.onkeydown = ({key}) => key === "Enter" && head.click();
  head.onclick = () => {
    const rows = [...document.querySelectorAll("tr.run")];
    head.sign = -(head.sign || -1);
    rows.sort((a, b) => order(cell(a, column), cell(b, column), head.sign));
    rows.forEach(row => row.parentNode.append(row));
  };
});
