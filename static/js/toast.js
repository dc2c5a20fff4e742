// [data-toast]: removed after ten seconds, not counting time with hover or focus.
// [data-dismiss] inside it removes it immediately.
const TOAST_SECONDS = 10;
const toastAges = new WeakMap();

setInterval(() => {
  for (const toast of document.querySelectorAll("[data-toast]")) {
    if (document.hidden || toast.matches(":hover, :focus-within")) continue;
    const age = (toastAges.get(toast) || 0) + 1;
    toastAges.set(toast, age);
    if (age > TOAST_SECONDS) toast.remove();
  }
}, 1000);

document.addEventListener("click", (event) => {
  event.target.closest("[data-dismiss]")?.closest("[data-toast]")?.remove();
});
