// Click or press a column's heading: rows are sorted by it, up and then down. Equal rows keep their order.
for (const button of document.querySelectorAll("th button")) {
  button.addEventListener("click", () => {
    const head = button.closest("th"), body = head.closest("table").tBodies[0];
    const down = head.getAttribute("aria-sort") === "ascending", sign = down ? -1 : 1;
    for (const other of head.parentNode.cells) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    const key = (row) => {
      const cell = row.cells[head.cellIndex], value = cell.dataset.value;
      if (value !== undefined) return Number(value);
      return cell.classList.contains("number") ? Infinity : cell.textContent;
    };
    const compare = (a, b) => (typeof a === "number" && typeof b === "number" ? a - b :
      String(a).localeCompare(String(b), undefined, { numeric: true }));
    body.append(...Array.from(body.rows).sort((a, b) => sign * compare(key(a), key(b))));
  });
}
