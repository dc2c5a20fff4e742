// Single-key shortcuts. Off while typing in a field, and if <html data-keys="off">.
//   [data-go="s"]       g, then s: follow this link
//   [data-search]       /: focus this field
//   [data-rows]         j and k: move through its children
//   [data-undo]         u: press the newest button or submit the newest form
//   [data-hotkey="a"]   a: press this; inside a row of [data-rows] only if the row has the focus
let goDeadline = 0; // until when the second key of a "g" sequence is accepted

function isTyping(target) {
  return target.isContentEditable
    || target.matches("textarea, select, input:not([type=checkbox], [type=radio], [type=button], [type=submit])");
}

function currentRow() {
  return document.activeElement?.closest("[data-rows] > *");
}

function focusTarget(row) {
  return row.querySelector("[data-open], th a") || row.querySelector("a, input, button");
}

function move(step) {
  const row = currentRow();
  const list = row ? row.parentElement : document.querySelector("[data-rows]");
  if (!list) return false;
  const rows = [...list.children].filter((child) => !child.hidden && focusTarget(child));
  const next = row ? rows[rows.indexOf(row) + step] : rows[step > 0 ? 0 : rows.length - 1];
  if (next) {
    focusTarget(next).focus();
    next.scrollIntoView({ block: "nearest" });
  }
  return true;
}

// The checkbox that selects a row: its own, or that of the same tool in the board's list. Checkboxes
// that act immediately, like the preload toggle, do not select.
function rowCheckbox(row) {
  const sameTool = row?.dataset.row && `[data-pick="${CSS.escape(row.dataset.row)}"] [data-select-row]`;
  return row?.querySelector("[data-select-row], .pick input[type=checkbox]") || (sameTool && document.querySelector(sameTool));
}

function press(element, shiftKey = false) {
  if (!element) return false;
  if (shiftKey) element.dispatchEvent(new MouseEvent("click", { bubbles: true, cancelable: true, shiftKey }));
  else element.click();
  return true;
}

function go(letter) {
  return press(document.querySelector(`[data-go="${CSS.escape(letter)}"]`));
}

function pressHotkey(key) {
  const selector = `[data-hotkey="${CSS.escape(key)}"]`;
  const inRow = currentRow()?.querySelector(selector);
  const onPage = [...document.querySelectorAll(selector)].find((control) => !control.closest("[data-rows]"));
  return press(inRow || onPage);
}

function openRowMenu() {
  const summary = currentRow()?.querySelector("details[data-menu] > summary");
  if (!summary) return false;
  summary.click();
  const first = summary.parentElement.open && summary.parentElement.querySelector(":scope > :not(summary) :is(a, button, input, select)");
  (first || summary).focus();
  return true;
}

function undo() {
  const offers = [...document.querySelectorAll("[data-undo]")].filter((control) => !control.closest(".still"));
  const newest = offers.findLast((control) => control.closest("#toasts")) || offers.at(-1);
  if (!newest?.matches("form")) return press(newest);
  newest.requestSubmit();
  return true;
}

const ACTIONS = {
  "?": () => press(document.querySelector('[data-dialog="keys"]')),
  "/": () => {
    const field = document.querySelector("[data-search]");
    field?.focus();
    field?.select();
    return Boolean(field);
  },
  j: () => move(1),
  k: () => move(-1),
  x: () => press(rowCheckbox(currentRow())),
  X: () => press(rowCheckbox(currentRow()), true),
  ".": openRowMenu,
  u: undo,
  Enter: () => {
    const row = currentRow();
    const onControl = document.activeElement?.matches("a, button, summary");
    return Boolean(row) && !onControl && press(row.querySelector("[data-open], th a"));
  },
};

document.addEventListener("keydown", (event) => {
  if (event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "Escape") {
    // Dialogs and menus close themselves; here a field or a row loses the focus.
    if (!document.querySelector("dialog[open]")) document.activeElement?.blur();
    return;
  }
  if (document.documentElement.dataset.keys === "off") return;
  if (isTyping(event.target) || document.querySelector("dialog[open]")) return;
  let handled;
  if (Date.now() < goDeadline) {
    goDeadline = 0;
    delete document.documentElement.dataset.going;
    handled = go(event.key);
  } else if (event.key === "g" && !event.shiftKey) {
    goDeadline = Date.now() + 1500;
    document.documentElement.dataset.going = ""; // the sidebar shows its letters
    setTimeout(() => { if (Date.now() >= goDeadline) delete document.documentElement.dataset.going; }, 1600);
    handled = true;
  } else {
    handled = (ACTIONS[event.key] && ACTIONS[event.key]()) || (event.key !== "Enter" && pressHotkey(event.key));
  }
  if (handled) event.preventDefault();
});
