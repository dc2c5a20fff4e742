// [data-dialog="id"]: opens that <dialog>. Closing is the dialog's own form.
document.addEventListener("click", (event) => {
  const opener = event.target.closest("[data-dialog]");
  if (opener) document.getElementById(opener.dataset.dialog)?.showModal();
});
