// Links and forms that follow the filters of the page, which htmx changes without a reload.
//   [data-share]         a [data-copy] button: copies the address of the page
//   [data-address]       a form whose field `address` gets the current query string
//   [data-address-link]  a link that gets the current query string
function followAddress() {
  for (const button of document.querySelectorAll("[data-share]")) button.dataset.copy = location.href;
  for (const form of document.querySelectorAll("[data-address]")) form.elements.address.value = location.search.slice(1);
  for (const link of document.querySelectorAll("[data-address-link]")) link.search = location.search;
}

followAddress();
document.addEventListener("htmx:pushedIntoHistory", followAddress);
