// Searching the table of attentions. Its words stand in the address beside those of the linears:
//   report.html#attention=mask+kept
"use strict";
(() => {
  const section = document.querySelector(".attention-section");
  if (!section) return;
  const search = section.querySelector(".search");
  const rows = [...section.querySelectorAll("tr.attention")];
  const texts = new Map(rows.map((row) => [row, row.textContent.toLowerCase()]));

  function filter() {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    let count = 0;
    for (const row of rows) {
      const fits = words.every((word) => texts.get(row).includes(word));
      row.classList.toggle("out", !fits);
      count += fits;
    }
    section.querySelector(".nothing").hidden = count > 0;
    const all = `${rows.length} attentions`;
    section.querySelector(".shown").textContent = count === rows.length ? all : `${count} of ${all}`;
  }

  function remember() {
    const asked = new URLSearchParams(location.hash.slice(1));
    asked.delete("attention");
    if (search.value) asked.set("attention", search.value);
    try {
      history.replaceState(null, "", `#${asked}`);
    } catch {
      // A page inside another may have no address of its own.
    }
  }

  function recall() {
    search.value = new URLSearchParams(location.hash.slice(1)).get("attention") ?? "";
    filter();
  }

  search.addEventListener("input", () => {
    filter();
    remember();
  });
  window.addEventListener("hashchange", recall);
  section.querySelector(".controls").hidden = false;
  recall();
})();
