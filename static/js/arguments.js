// [data-arguments="id"]: fields that write into the JSON of that textarea, and follow it. Each has
// its [data-argument], a name, and its [data-kind]: text, integer, number, or choice of JSON texts.
// Without scripts only the JSON is there.
function readArguments(area) {
  try {
    const found = JSON.parse(area.value || "{}");
    return found && typeof found === "object" && !Array.isArray(found) ? found : null;
  } catch {
    return null;
  }
}

function valueOf(field) {
  if (field.dataset.kind === "text") return field.value;
  return field.dataset.kind === "choice" ? JSON.parse(field.value) : Number(field.value);
}

function writeArgument(area, field) {
  const given = readArguments(area);
  if (!given) return;
  const name = field.dataset.argument;
  const kept = Object.entries(given).filter(([key]) => key !== name || field.value !== "");
  const mine = kept.find(([key]) => key === name);
  if (mine) mine[1] = valueOf(field);
  else if (field.value !== "") kept.push([name, valueOf(field)]);
  area.value = JSON.stringify(Object.fromEntries(kept), null, 2);
}

function showArguments(area, set) {
  const given = readArguments(area);
  for (const field of set.querySelectorAll("[data-argument]")) {
    field.disabled = !given;
    if (!given || field === document.activeElement) continue;
    const name = field.dataset.argument;
    const value = Object.hasOwn(given, name) ? given[name] : undefined;
    if (field.dataset.kind === "choice") {
      const same = (option) => option.value && JSON.stringify(JSON.parse(option.value)) === JSON.stringify(value);
      field.value = [...field.options].find(same)?.value ?? "";
    } else field.value = value === undefined || typeof value === "object" ? "" : String(value);
  }
}

for (const set of document.querySelectorAll("[data-arguments]")) {
  const area = document.getElementById(set.dataset.arguments);
  if (!area) continue;
  set.hidden = false;
  showArguments(area, set);
  area.addEventListener("input", () => showArguments(area, set));
  set.addEventListener("input", (event) => writeArgument(area, event.target));
}
