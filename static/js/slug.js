// [data-slug-of="id"]: suggests an id from the name in that field until the id is edited by hand.
const MAX_LENGTH = 60;

function slugOf(name) {
  const plain = name.normalize("NFKD").replace(/\p{M}/gu, "").toLowerCase();
  return plain.replace(/[^a-z0-9]+/g, "-").slice(0, MAX_LENGTH).replace(/^-+|-+$/g, "");
}

for (const field of document.querySelectorAll("[data-slug-of]")) {
  const name = document.getElementById(field.dataset.slugOf);
  let suggestion = field.value ? null : ""; // null: edited by hand
  name?.addEventListener("input", () => {
    if (suggestion === null || field.value !== suggestion) return;
    suggestion = slugOf(name.value);
    field.value = suggestion;
  });
}
