// [data-trend]: shows the values of the column under the pointer, or of the one chosen with the arrow
// keys, in its .tip. Enter opens the sessions behind the column; Escape hides the values.
function columnsOf(chart) {
  return [...chart.querySelectorAll("a[data-column]")];
}

function show(chart, column) {
  const tip = chart.querySelector(".tip");
  for (const other of columnsOf(chart)) other.classList.toggle("on", other === column);
  tip.hidden = !column;
  if (!column) return;
  if (tip.textContent !== column.dataset.column) tip.textContent = column.dataset.column;
  const slot = column.querySelector(".slot").getBoundingClientRect();
  const box = chart.getBoundingClientRect();
  const center = slot.left + slot.width / 2 - box.left;
  const half = tip.offsetWidth / 2;
  tip.style.left = `${Math.max(half, Math.min(center, box.width - half))}px`;
}

document.addEventListener("pointermove", (event) => {
  const chart = event.target.closest?.("[data-trend]");
  const column = event.target.closest?.("a[data-column]");
  if (chart && column) show(chart, column);
  for (const other of document.querySelectorAll("[data-trend]")) {
    if (other !== chart && !other.matches(":focus-within")) show(other, null);
  }
});

document.addEventListener("keydown", (event) => {
  const chart = event.target.closest?.("[data-trend]");
  if (!chart) return;
  const columns = columnsOf(chart);
  const current = columns.findIndex((column) => column.classList.contains("on"));
  const last = columns.length - 1;
  const targets = {
    ArrowLeft: current < 0 ? last : Math.max(current - 1, 0),
    ArrowRight: current < 0 ? last : Math.min(current + 1, last),
    Home: 0,
    End: last,
  };
  if (event.key in targets) show(chart, columns[targets[event.key]]);
  else if (event.key === "Enter" && current >= 0) location.assign(columns[current].href.baseVal);
  else if (event.key === "Escape") show(chart, null);
  else return;
  event.preventDefault();
  event.stopPropagation();
});

document.addEventListener("focusout", (event) => {
  const chart = event.target.closest?.("[data-trend]");
  if (chart) show(chart, null);
});
