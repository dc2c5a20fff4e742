// [data-slider="id"]: a range beside the number field of that id; either moves the other. Without
// scripts only the field is there.
for (const slider of document.querySelectorAll("[data-slider]")) {
  const field = document.getElementById(slider.dataset.slider);
  if (!field) continue;
  slider.hidden = false;
  slider.addEventListener("input", () => { field.value = slider.value; });
  field.addEventListener("input", () => { if (field.value) slider.value = field.value; });
}
