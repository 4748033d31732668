// What every page uses: times in the viewer's zone, confirmations, the CSRF header of htmx.

const shown = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "medium" });

function localTimes(root) {
  for (const element of root.querySelectorAll("time[datetime]")) {
    const at = new Date(element.dateTime);
    if (!Number.isNaN(at.getTime())) element.textContent = shown.format(at);
  }
}

// Widths of bars and other styles that only data can tell: <span data-width="42"> is 42 % wide.
function widths(root) {
  for (const element of root.querySelectorAll("[data-width]")) {
    element.style.width = `${Math.max(0, Math.min(100, Number(element.dataset.width)))}%`;
  }
}

export function refresh(root) {
  localTimes(root);
  widths(root);
}

refresh(document);
document.addEventListener("htmx:load", (event) => refresh(event.detail.elt.parentNode ?? document));

document.addEventListener("htmx:configRequest", (event) => {
  const csrf = document.querySelector('meta[name="csrf"]');
  if (csrf) event.detail.headers["X-CSRF-Token"] = csrf.content;
});
// A rejected form is shown again with its problem; htmx would drop an answer with an error status.
// A part that the page asks for by itself, every few seconds, stays as it is instead.
document.addEventListener("htmx:beforeSwap", (event) => {
  const { status, responseText } = event.detail.xhr;
  if (status >= 400 && responseText) event.detail.shouldSwap = !isPoll(event);
});

function isPoll(event) {
  const { elt, triggeringEvent } = event.detail.requestConfig;
  return !triggeringEvent && elt.getAttribute("hx-trigger")?.startsWith("every ");
}

// The notice below the navigation. An empty text hides it.
export const LOST = "The live connection is lost. The page shows the last known state and reconnects.";
export function connection(text) {
  const notice = document.getElementById("connection");
  if (notice.textContent !== text) notice.textContent = text;
  notice.hidden = !text;
}

// A page in the background does not ask, and a page whose question fails says so.
document.addEventListener("htmx:beforeRequest", (event) => {
  if (document.hidden && isPoll(event)) event.preventDefault();
});
document.addEventListener("htmx:afterRequest", (event) => {
  if (isPoll(event)) connection(event.detail.successful ? "" : LOST);
});

// What an update must not undo: how far a table is scrolled.
const scrolled = new Map();
document.addEventListener("htmx:beforeSwap", () => keepScroll(document));
document.addEventListener("htmx:afterSwap", () => restoreScroll(document));
export function keepScroll(root) {
  scrolled.clear();
  for (const each of root.querySelectorAll(".scroll[id]")) scrolled.set(each.id, each.scrollLeft);
}
export function restoreScroll(root) {
  for (const each of root.querySelectorAll(".scroll[id]")) each.scrollLeft = scrolled.get(each.id) ?? 0;
}

// <button data-confirm="Reset the counts of user:42?"> asks before its form is sent.
const dialog = document.getElementById("confirm");
let confirmed = null;
document.addEventListener(
  "submit",
  (event) => {
    const button = event.submitter;
    if (!button?.dataset.confirm || confirmed === button) {
      confirmed = null;
      return;
    }
    event.preventDefault();
    event.stopImmediatePropagation();
    document.getElementById("confirm-text").textContent = button.dataset.confirm;
    dialog.returnValue = "";
    dialog.onclose = () => {
      if (dialog.returnValue !== "yes") return;
      confirmed = button;
      button.form.requestSubmit(button);
    };
    dialog.showModal();
  },
  true,
);

// The live stream of the console. The browser reconnects by itself; the page says so meanwhile.
export function live(handlers) {
  const notice = document.getElementById("connection");
  const source = new EventSource("/console/live");
  source.onopen = () => { notice.hidden = true; };
  source.onerror = () => {
    notice.hidden = false;
    // After an answer that is no stream (the session has ended), the browser gives up.
    if (source.readyState === EventSource.CLOSED) setTimeout(() => live(handlers), 5000);
  };
  for (const [name, handle] of Object.entries(handlers)) {
    source.addEventListener(name, (event) => handle(event.data));
  }
  return source;
}
