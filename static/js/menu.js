// details[data-menu]: at most one is open; Esc and a click elsewhere close it.
function closeMenus(except) {
  for (const menu of document.querySelectorAll("details[data-menu][open]")) {
    if (menu !== except) menu.open = false;
  }
}

document.addEventListener("click", (event) => {
  const menu = event.target.closest("details[data-menu]");
  const item = menu && event.target.closest("button, a");
  closeMenus(item ? null : menu);
});

document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape") return;
  const menu = document.querySelector("details[data-menu][open]");
  if (!menu) return;
  menu.open = false;
  menu.querySelector("summary").focus();
  event.stopPropagation();
}, true);
