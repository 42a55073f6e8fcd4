// Searching, sorting and folding the table of linears. What is chosen stands in the address, so that a link shows it:
//   report.html#q=mlp&kind=rule&sort=flops&down
"use strict";
(() => {
  const table = document.querySelector("table.linears");
  if (!table) return;
  const controls = document.querySelector(".controls");
  const search = controls.querySelector(".search");
  const kind = controls.querySelector(".kind");
  const fold = controls.querySelector(".fold");
  const shown = controls.querySelector(".shown");
  const heads = [...table.tHead.rows[0].cells];
  const layers = [...table.tBodies].map((body) => {
    const [head, ...rows] = body.rows;
    return { body, head, rows, toggle: head.querySelector(".toggle"), folded: false };
  });
  const rows = layers.flatMap((layer) => layer.rows);
  const texts = new Map(rows.map((row) => [row, row.textContent.toLowerCase()]));
  const sorted = document.createElement("tbody");
  table.append(sorted);
  let order = { column: -1, down: false };

  const value = (row, column) => {
    const cell = row.cells[column];
    const text = cell.dataset.value ?? cell.textContent;
    return heads[column].dataset.sort === "number" ? Number(text) : text;
  };
  const compare = (a, b) => (typeof a === "number" ? a - b : a.localeCompare(b, "en", { numeric: true }));

  function filter() {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    let count = 0;
    for (const row of rows) {
      const text = texts.get(row);
      const fits = words.every((word) => text.includes(word)) && (!kind.value || row.dataset.kind === kind.value);
      row.classList.toggle("out", !fits);
      count += fits;
    }
    const asked = words.length > 0 || kind.value !== "";
    for (const layer of layers) {
      layer.head.classList.toggle("out", layer.rows.every((row) => row.classList.contains("out")));
      const folded = layer.folded && !asked && order.column < 0; // what is searched for is shown
      layer.toggle.setAttribute("aria-expanded", String(!folded));
      for (const row of layer.rows) row.classList.toggle("folded", folded);
    }
    document.querySelector(".nothing").hidden = count > 0;
    shown.textContent = count === rows.length ? `${count} linears` : `${count} of ${rows.length} linears`;
    fold.textContent = layers.every((layer) => layer.folded) ? "expand layers" : "collapse layers";
    fold.disabled = order.column >= 0;
  }

  function sort() {
    heads.forEach((head, column) => {
      const direction = order.down ? "descending" : "ascending";
      head.setAttribute("aria-sort", column === order.column ? direction : "none");
    });
    table.classList.toggle("plain", order.column >= 0);
    if (order.column < 0) {
      for (const layer of layers) layer.body.append(...layer.rows);
      return;
    }
    const sign = order.down ? -1 : 1;
    sorted.append(...[...rows].sort((a, b) => sign * compare(value(a, order.column), value(b, order.column))));
  }

  function remember() {
    const asked = new URLSearchParams(location.hash.slice(1)); // what others remember there stays
    for (const own of ["q", "kind", "sort", "down"]) asked.delete(own);
    if (search.value) asked.set("q", search.value);
    if (kind.value) asked.set("kind", kind.value);
    if (order.column >= 0) asked.set("sort", heads[order.column].querySelector("button").dataset.key);
    if (order.down) asked.set("down", "");
    try {
      history.replaceState(null, "", `#${asked}`);
    } catch {
      // A page inside another may have no address of its own.
    }
  }

  function recall() {
    const asked = new URLSearchParams(location.hash.slice(1));
    search.value = asked.get("q") ?? "";
    kind.value = asked.get("kind") ?? "";
    if (kind.selectedIndex < 0) kind.value = "";
    const column = heads.findIndex((head) => head.querySelector("button").dataset.key === asked.get("sort"));
    order = { column, down: column >= 0 && asked.has("down") };
    sort();
    filter();
  }

  heads.forEach((head, column) =>
    head.querySelector("button").addEventListener("click", () => {
      const first = head.dataset.sort === "number"; // the heaviest first; a third click gives the layers back
      if (order.column !== column) order = { column, down: first };
      else if (order.down === first) order = { column, down: !first };
      else order = { column: -1, down: false };
      sort();
      filter();
      remember();
    }),
  );
  for (const layer of layers)
    layer.toggle.addEventListener("click", () => {
      layer.folded = !layer.folded;
      filter();
    });
  fold.addEventListener("click", () => {
    const all = layers.every((layer) => layer.folded);
    for (const layer of layers) layer.folded = !all;
    filter();
  });
  for (const [field, event] of [[search, "input"], [kind, "change"]])
    field.addEventListener(event, () => {
      filter();
      remember();
    });
  window.addEventListener("hashchange", recall);

  controls.hidden = false;
  // Of many equal layers one is worth reading at once; what is in no layer, or not supported, always is.
  if (rows.length > 40)
    layers.forEach((layer, index) => {
      const telling = layer.rows.some((row) => row.dataset.kind === "unsupported");
      layer.folded = index > 0 && layer.body.dataset.layer !== "" && !telling;
    });
  recall();
})();
