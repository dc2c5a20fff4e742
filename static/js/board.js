// The board of a group. Everything on it is a form; this keeps the place of a person on it.
//   [data-row="name"]     a member; after an act the focus goes to the [data-handle] of the row that
//                         [data-focus] names, or of the row that took its place
//   [data-keep-scroll]    keeps how far it was scrolled
//   [data-board-move]     goes to its field for a group, in the row's menu where it is there
//   [draggable]           rows can be dragged to a [data-drop] section, as the checkbox and the
//                         button do it
const kept = { row: -1, scroll: 0, move: false };

function rows() {
  return [...document.querySelectorAll("#board [data-row]")];
}

document.addEventListener("htmx:configRequest", (event) => {
  if (event.detail.verb !== "post" || !document.getElementById("board")) return;
  // The filter and the tab may have changed the address since the forms were drawn.
  event.detail.parameters.address = location.search.slice(1);
});

document.addEventListener("htmx:beforeRequest", (event) => {
  const row = event.target.closest?.("[data-row]");
  kept.row = row ? rows().indexOf(row) : -1;
});

document.addEventListener("htmx:beforeSwap", (event) => {
  if (event.detail.target.id !== "board") return;
  kept.scroll = document.querySelector("[data-keep-scroll]")?.scrollTop || 0;
  kept.move = true;
});

document.addEventListener("htmx:afterSettle", () => {
  if (!kept.move) return;
  kept.move = false;
  const list = document.querySelector("[data-keep-scroll]");
  if (list) list.scrollTop = kept.scroll;
  const board = document.getElementById("board");
  if (!board) return;
  const all = rows();
  const focus = board.querySelector("[data-focus]")?.dataset.focus;
  const named = focus && all.find((row) => row.dataset.row === focus);
  const failed = board.querySelector(".failed");
  const row = failed || named || (kept.row >= 0 && all[Math.min(kept.row, all.length - 1)]);
  const handle = row && row.querySelector("[data-handle]:not(:disabled), summary, a");
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

// --- Dragging, as decoration -----------------------------------------------------------------

let dragged = null;

function sectionOf(event) {
  return dragged && event.target.closest?.("[data-drop]");
}

function drop(section) {
  const given = section.dataset.drop;
  if (dragged.dataset.row) {
    if (dragged.dataset.given !== given) dragged.querySelector("[data-handle]")?.click();
    return;
  }
  const list = dragged.closest("form");
  const box = dragged.querySelector("[data-select-row]");
  if (!box.checked) box.click();
  htmx.ajax("POST", list.action, {
    source: list,
    target: "#board",
    swap: "innerHTML",
    values: { given: given === "preload" ? "always" : "demand", to: document.querySelector("[data-board]").dataset.board },
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
  for (const one of document.querySelectorAll("[data-drop]")) one.classList.toggle("over-it", one === section);
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
  for (const one of document.querySelectorAll("[data-drop]")) one.classList.remove("over-it");
});
