// Two-way sync between form fields and the JSON in a textarea. [data-arguments="id"] names the
// textarea; each field has [data-argument], the argument's name, and [data-kind]: text, integer,
// number or choice (its options are JSON). Without scripts only the textarea is available.
function readArguments(area) {
  try {
    const value = JSON.parse(area.value || "{}");
    return value && typeof value === "object" && !Array.isArray(value) ? value : null;
  } catch {
    return null;
  }
}

function parseField(field) {
  if (field.dataset.kind === "text") return field.value;
  return field.dataset.kind === "choice" ? JSON.parse(field.value) : Number(field.value);
}

function writeArgument(area, field) {
  const values = readArguments(area);
  if (!values) return;
  const name = field.dataset.argument;
  const entries = Object.entries(values).filter(([key]) => key !== name || field.value !== "");
  const entry = entries.find(([key]) => key === name);
  if (entry) entry[1] = parseField(field);
  else if (field.value !== "") entries.push([name, parseField(field)]);
  area.value = JSON.stringify(Object.fromEntries(entries), null, 2);
}

function updateFields(area, set) {
  const values = readArguments(area);
  for (const field of set.querySelectorAll("[data-argument]")) {
    field.disabled = !values;
    if (!values || field === document.activeElement) continue;
    const name = field.dataset.argument;
    const value = Object.hasOwn(values, name) ? values[name] : undefined;
    if (field.dataset.kind === "choice") {
      const matches = (option) => option.value && JSON.stringify(JSON.parse(option.value)) === JSON.stringify(value);
      field.value = [...field.options].find(matches)?.value ?? "";
    } else field.value = value === undefined || typeof value === "object" ? "" : String(value);
  }
}

for (const set of document.querySelectorAll("[data-arguments]")) {
  const area = document.getElementById(set.dataset.arguments);
  if (!area) continue;
  set.hidden = false;
  updateFields(area, set);
  area.addEventListener("input", () => updateFields(area, set));
  set.addEventListener("input", (event) => writeArgument(area, event.target));
}
