document.querySelectorAll('.attend').forEach(box => {
  const views = JSON.parse(box.dataset.views);
  const add = (parent, kind) => parent.appendChild(document.createElement(kind));
  const choose = label => {
    const frame = add(box, 'label'); frame.append(label);
    const select = add(frame, 'select'); select.className = label; return select;
  };
  const which = choose('view'), layer = choose('layer'), head = choose('head'), stage = add(box, 'div');
  const link = add(box, 'a');
  Object.assign(link, {className: 'data', download: 'attention.csv', textContent: 'attention.csv', href: '#'});
  const fill = (select, names) => {
    select.replaceChildren(...names.map((name, i) => new Option(name, i)));
    select.parentNode.hidden = names.length < 2;
  };
  let now, numbers, keys, queries, picked;
  // The weights of a query: the mean over the layers and heads that are chosen.
  const row = query => {
    const [L, H, T, S] = [now.layers.length, now.heads.length, queries.length, keys.length];
    const chosen = (select, size) => +select.value ? [select.value - 1] : [...Array(size).keys()];
    const total = new Float64Array(S), ls = chosen(layer, L), hs = chosen(head, H);
    for (const l of ls) for (const h of hs) for (let s = 0; s < S; s++)
      total[s] += numbers[((l * H + h) * T + query) * S + s] / 65535 / ls.length / hs.length;
    return total;
  };
  const draw = () => {
    const weights = row(picked), most = Math.max(...weights, 1e-9);
    queries.forEach((token, i) => token.classList.toggle('picked', i === picked));
    keys.forEach((token, i) => {
      token.dataset.weight = weights[i].toFixed(4);
      token.title = token.name + ' ' + (100 * weights[i]).toFixed(1) + '%';
      const share = 100 * Math.sqrt(weights[i] / most) * (now.image ? .75 : .5);
      token.style.background = `color-mix(in srgb, var(--s1) ${share.toFixed(1)}%, transparent)`;
    });
  };
  const line = names => {
    const place = add(stage, 'p');
    return names.map(name => {
      const token = add(place, 'span'); token.textContent = token.name = name;
      return token;
    });
  };
  const patches = () => {
    const [rows, columns] = now.grid, place = add(stage, 'div');
    place.className = 'patches';
    place.style.backgroundImage = `url(data:image/png;base64,${now.image})`;
    place.style.gridTemplateColumns = `repeat(${columns}, 1fr)`;
    return [...Array(rows * columns).keys()].map(i => {
      const token = add(place, 'span');
      token.name = `row ${1 + Math.floor(i / columns)}, column ${1 + i % columns}`;
      return token;
    });
  };
  const show = () => {
    now = views[which.value];
    numbers = new Uint16Array(Uint8Array.from(atob(now.weights), c => c.charCodeAt(0)).buffer);
    stage.replaceChildren();
    queries = now.queries.length ? line(now.queries) : [];
    if (now.image) queries = queries.concat(patches());
    keys = now.keys ? line(now.keys) : queries;
    queries.forEach((token, i) => {
      token.tabIndex = 0; token.role = 'button';
      token.onpointerenter = token.onclick = token.onfocus = () => { picked = i; draw(); };
    });
    picked = now.image && now.queries.length ? 0 : queries.length - 1;
    draw();
  };
  const quoted = ({name}) => `"${name.replace(/(^|[;\t\r\n]"*)(?=[=+\-@\t\r\n\uff1d\uff0b\uff0d\uff20])/g, "$1'").replaceAll('"', '""')}"`;
  link.onclick = () => {
    const lines = queries.map((token, i) => [quoted(token), ...Array.from(row(i), x => x.toFixed(4))].join());
    const table = [['query', ...keys.map(quoted)].join(), ...lines].join('\n');
    link.href = 'data:text/csv;charset=utf-8,' + encodeURIComponent(table + '\n');
  };
  const start = () => {
    fill(layer, ['mean', ...views[which.value].layers]); fill(head, ['mean', ...views[which.value].heads]); show();
  };
  fill(which, views.map(view => view.name));
  which.onchange = start; layer.onchange = head.onchange = draw;
  start();
});
