// [data-dialog="id"]: opens that <dialog>. Closing is the dialog's own form.
// The dialog of keys lists what this page adds: every [data-hotkey] with its words.
function listPageKeys(dialog) {
  const list = dialog.querySelector("[data-page-keys]");
  if (!list) return;
  const keys = new Map();
  for (const one of document.querySelectorAll("[data-hotkey]")) {
    const bare = one.cloneNode(true);
    for (const part of bare.querySelectorAll("kbd, svg")) part.remove();
    const words = one.dataset.hotkeyWords || one.getAttribute("aria-label") || bare.textContent;
    const where = one.closest("[data-rows]") ? ", in a row" : "";
    if (!keys.has(one.dataset.hotkey)) keys.set(one.dataset.hotkey, words.trim().replace(/\s+/g, " ") + where);
  }
  list.replaceChildren(...[...keys].map(([key, words]) => {
    const row = document.createElement("div");
    row.append(document.createElement("dt"), document.createElement("dd"));
    row.firstChild.textContent = words;
    row.lastChild.append(document.createElement("kbd"));
    row.lastChild.firstChild.textContent = key;
    return row;
  }));
  list.closest("[data-page-keys-part]").hidden = keys.size === 0;
}

document.addEventListener("click", (event) => {
  const opener = event.target.closest("[data-dialog]");
  const dialog = opener && document.getElementById(opener.dataset.dialog);
  if (!dialog) return;
  listPageKeys(dialog);
  dialog.showModal();
});
