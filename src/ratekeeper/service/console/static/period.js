// Fields of times: the viewer reads and types local times, and the URL holds UTC.

const fields = document.querySelectorAll("form[data-period] [data-time]");
const pad = (value) => String(value).padStart(2, "0");

function localText(at) {
  const date = `${at.getFullYear()}-${pad(at.getMonth() + 1)}-${pad(at.getDate())}`;
  const seconds = at.getSeconds() ? `:${pad(at.getSeconds())}` : "";
  return `${date}T${pad(at.getHours())}:${pad(at.getMinutes())}${seconds}`;
}

for (const field of fields) {
  const at = new Date(field.value);
  // A value that is not a time stays as it was typed.
  if (field.value && Number.isNaN(at.getTime())) continue;
  const value = field.value && localText(at);
  field.type = "datetime-local";
  field.step = "any";
  field.value = value;
  field.labels[0].querySelector("[data-zone]").textContent = "(your time)";
}

for (const form of document.querySelectorAll("form[data-period]")) {
  form.addEventListener("formdata", ({ formData }) => {
    for (const field of form.querySelectorAll('[type="datetime-local"]')) {
      const at = new Date(field.value);
      if (field.value) formData.set(field.name, at.toISOString().replace(".000Z", "Z"));
    }
    // Times that were typed replace the last hour, day and so on.
    if (formData.get("from") || formData.get("to")) formData.delete("last");
    for (const [name, value] of [...formData]) if (value === "") formData.delete(name);
  });
}
