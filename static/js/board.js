// Group board: restores focus and scroll position after htmx swaps; drag and drop.
//   [data-row="name"]     a member; after an action, focus moves to the [data-handle] of the row in
//                         [data-focus], or of the row that is now at its position
//   [data-keep-scroll]    keeps its scroll position
//   [data-board-move]     focuses its group field, and opens the row's menu if it is in one
//   [draggable]           rows can be dragged to a [data-drop] section; the checkbox and the button
//                         do the same
const saved = { row: -1, scroll: 0, restore: false };

function rows() {
  return [...document.querySelectorAll("#board [data-row]")];
}

document.addEventListener("htmx:configRequest", (event) => {
  if (event.detail.verb !== "post" || !document.getElementById("board")) return;
  // The filter and the tab may have changed the URL since the forms were rendered.
  event.detail.parameters.address = location.search.slice(1);
});

document.addEventListener("htmx:beforeRequest", (event) => {
  const row = event.target.closest?.("[data-row]");
  saved.row = row ? rows().indexOf(row) : -1;
});

document.addEventListener("htmx:beforeSwap", (event) => {
  if (event.detail.target.id !== "board") return;
  saved.scroll = document.querySelector("[data-keep-scroll]")?.scrollTop || 0;
  saved.restore = true;
});

document.addEventListener("htmx:afterSettle", () => {
  if (!saved.restore) return;
  saved.restore = false;
  const list = document.querySelector("[data-keep-scroll]");
  if (list) list.scrollTop = saved.scroll;
  const board = document.getElementById("board");
  if (!board) return;
  const all = rows();
  const focus = board.querySelector("[data-focus]")?.dataset.focus;
  const focused = focus && all.find((row) => row.dataset.row === focus);
  const failed = board.querySelector(".failed");
  const row = failed || focused || (saved.row >= 0 && all[Math.min(saved.row, all.length - 1)]);
  const handle = row && (row.querySelector("[data-handle]:not(:disabled)") || row.querySelector("summary, a"));
  if (handle) handle.focus();
  else if (document.activeElement === document.body) board.querySelector("[data-search]")?.focus();
});

document.addEventListener("click", (event) => {
  const label = event.target.closest?.("[data-board-move]");
  if (!label) return;
  const menu = label.closest("details");
  if (menu) menu.open = true;
  const field = document.getElementById(label.htmlFor);
  event.preventDefault();
  field.focus();
  field.select();
});

// --- Drag and drop --------------------------------------------------------------------------

let dragged = null;

function sectionOf(event) {
  return dragged && event.target.closest?.("[data-drop]");
}

function drop(section) {
  const target = section.dataset.drop;
  if (dragged.dataset.row) {
    if (dragged.dataset.given !== target) dragged.querySelector("[data-handle]")?.click();
    return;
  }
  const list = dragged.closest("form");
  const box = dragged.querySelector("[data-select-row]");
  if (!box.checked) box.click();
  htmx.ajax("POST", list.action, {
    source: list,
    target: "#board",
    swap: "innerHTML",
    values: { given: target === "preload" ? "always" : "demand", to: document.querySelector("[data-board]").dataset.board },
  });
}

document.addEventListener("dragstart", (event) => {
  dragged = event.target.closest?.("#board [draggable]");
  if (!dragged) return;
  event.dataTransfer.effectAllowed = "move";
  event.dataTransfer.setData("text/plain", dragged.dataset.row || dragged.dataset.pick);
  dragged.classList.add("dragging");
});

document.addEventListener("dragover", (event) => {
  const section = sectionOf(event);
  for (const other of document.querySelectorAll("[data-drop]")) other.classList.toggle("drop-target", other === section);
  if (section) event.preventDefault();
});

document.addEventListener("drop", (event) => {
  const section = sectionOf(event);
  if (!section) return;
  event.preventDefault();
  drop(section);
});

document.addEventListener("dragend", () => {
  dragged?.classList.remove("dragging");
  dragged = null;
  for (const section of document.querySelectorAll("[data-drop]")) section.classList.remove("drop-target");
});
