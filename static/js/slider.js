// [data-slider="id"]: keeps a range input and the number field with that id in sync. The range input
// is hidden without JavaScript.
for (const slider of document.querySelectorAll("[data-slider]")) {
  const field = document.getElementById(slider.dataset.slider);
  if (!field) continue;
  slider.hidden = false;
  slider.addEventListener("input", () => { field.value = slider.value; });
  field.addEventListener("input", () => { if (field.value) slider.value = field.value; });
}
