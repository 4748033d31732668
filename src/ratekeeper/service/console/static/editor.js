// The editor of the rule document. The textarea holds the text that the form sends; CodeMirror shows it.
// A draft is also kept in the tab's session storage until it is applied or discarded.

import { refresh } from "./console.js";
import {
  EditorState, EditorView, HighlightStyle, bracketMatching, defaultKeymap, drawSelection,
  highlightActiveLine, highlightActiveLineGutter, highlightSpecialChars, history, historyKeymap,
  indentOnInput, indentUnit, keymap, lineNumbers, lintGutter, lintKeymap, searchKeymap,
  setDiagnostics, syntaxHighlighting, tags, yaml,
} from "./vendor/codemirror.js";

// A large document takes the validator seconds, so it is checked after a longer pause.
const CHECK_AFTER_MS = 400;
const CHECK_LARGE_AFTER_MS = 1500;
const LARGE = 300_000;

const form = document.getElementById("draft");
const area = document.getElementById("document");
const check = document.getElementById("check");
const notice = document.getElementById("draft-notice");
const etag = form.elements.namedItem("etag");
const reason = form.elements.namedItem("reason");
const opened = area.value;

// ── The draft in the session storage ──

const key = `ratekeeper-draft:${form.dataset.owner}`;

function stored() {
  try {
    return JSON.parse(sessionStorage.getItem(key));
  } catch {
    return null;
  }
}

function keep(more = {}) {
  const draft = { text: area.value, etag: etag.value, reason: reason?.value ?? "", ...more };
  try {
    sessionStorage.setItem(key, JSON.stringify(draft));
  } catch {
    // The storage has a few megabytes. An older draft would be restored instead of this one.
    sessionStorage.removeItem(key);
    tell("This draft is too large to be kept when the page is closed.", false);
  }
}

function tell(text, canDiscard = true) {
  notice.firstElementChild.textContent = text;
  notice.lastElementChild.hidden = !canDiscard;
  notice.hidden = false;
}

function restore() {
  const draft = stored();
  if (form.dataset.done !== undefined && draft?.applying) {
    sessionStorage.removeItem(key);
    return;
  }
  if (form.dataset.posted !== undefined) {
    keep(); // the page contains the draft that was sent
    tell("This is your draft; it is not in force.");
    return;
  }
  if (!draft || draft.text === opened) return;
  area.value = draft.text;
  const isOld = draft.etag !== etag.value;
  etag.value = draft.etag;
  if (reason && !reason.value) reason.value = draft.reason;
  tell(
    isOld
      ? "Your draft is restored. The rules were changed since you began it; applying it shows how."
      : "Your draft is restored; it is not in force.",
  );
}

let isDiscarded = false;
document.getElementById("discard").addEventListener("click", () => {
  isDiscarded = true;
  sessionStorage.removeItem(key);
  location.assign(form.dataset.page);
});

restore();

// ── The editor ──

const colours = HighlightStyle.define([
  { tag: [tags.propertyName, tags.definition(tags.propertyName)], color: "var(--accent)" },
  { tag: tags.comment, color: "var(--faint)", fontStyle: "italic" },
  { tag: tags.string, color: "var(--good)" },
  { tag: [tags.keyword, tags.typeName, tags.labelName, tags.meta], color: "var(--warn)" },
  { tag: [tags.number, tags.bool, tags.null], color: "var(--warn)" },
  { tag: [tags.separator, tags.punctuation, tags.squareBracket, tags.brace], color: "var(--faint)" },
]);

const theme = EditorView.theme({
  "&": { backgroundColor: "var(--ground)", color: "var(--text)", fontSize: "14px", height: "32rem" },
  "&.cm-focused": { outline: "none" },
  ".cm-scroller": { fontFamily: "var(--mono)", lineHeight: "1.5" },
  ".cm-content": { caretColor: "var(--text)" },
  ".cm-cursor": { borderLeftColor: "var(--text)" },
  ".cm-gutters": { backgroundColor: "var(--card)", color: "var(--faint)", borderRight: "1px solid var(--line)" },
  ".cm-activeLine": { backgroundColor: "color-mix(in srgb, var(--tint) 60%, transparent)" },
  ".cm-activeLineGutter": { backgroundColor: "var(--tint)", color: "var(--text)" },
  "&.cm-focused .cm-selectionBackground, .cm-selectionBackground": { backgroundColor: "var(--tint)" },
  ".cm-tooltip, .cm-panels": { backgroundColor: "var(--card)", color: "var(--text)", border: "1px solid var(--line)" },
  ".cm-panels button, .cm-panels input": { color: "var(--text)" },
  ".cm-diagnostic": { overflowWrap: "anywhere", whiteSpace: "pre-wrap", maxWidth: "32rem" },
});

let timer = 0;
function changed() {
  clearTimeout(timer);
  const force = form.elements.namedItem("force");
  if (force) force.checked = false; // it was given for another draft
  const pause = view.state.doc.length > LARGE ? CHECK_LARGE_AFTER_MS : CHECK_AFTER_MS;
  timer = setTimeout(sync, pause);
}

// Copy the editor into the textarea, keep the draft, and let htmx check it.
function sync() {
  clearTimeout(timer);
  if (isDiscarded) return;
  const text = view.state.doc.toString();
  if (text === area.value) return;
  area.value = text;
  if (text === opened && form.dataset.posted === undefined) sessionStorage.removeItem(key);
  else keep();
  area.dispatchEvent(new CustomEvent("draft"));
}

// Chromium replaces selected text by an element with a style attribute, which the
// Content-Security-Policy forbids and reports. So typed text never reaches the page itself.
const typed = EditorView.domEventHandlers({
  beforeinput(event, target) {
    if (event.inputType !== "insertText" || !event.data || event.isComposing) return false;
    event.preventDefault();
    target.dispatch(target.state.replaceSelection(event.data), { userEvent: "input.type", scrollIntoView: true });
    return true;
  },
});

const view = new EditorView({
  state: EditorState.create({
    doc: area.value,
    extensions: [
      EditorView.cspNonce.of(document.querySelector('meta[name="nonce"]').content),
      lineNumbers(), lintGutter(), highlightSpecialChars(), history(), drawSelection(),
      indentOnInput(), bracketMatching(), highlightActiveLine(), highlightActiveLineGutter(),
      EditorView.lineWrapping, indentUnit.of("  "), EditorState.tabSize.of(2), yaml(),
      syntaxHighlighting(colours), theme, typed,
      // Tab leaves the editor, as everywhere on the page; Ctrl-] and Ctrl-[ indent.
      keymap.of([...defaultKeymap, ...historyKeymap, ...searchKeymap, ...lintKeymap]),
      EditorView.editorAttributes.of({ class: "editor" }),
      EditorView.contentAttributes.of({ "aria-labelledby": "document-label", spellcheck: "false", tabindex: "0" }),
      EditorView.updateListener.of((update) => { if (update.docChanged) changed(); }),
    ],
  }),
});
area.before(view.dom);
area.hidden = true;
document.getElementById("document-label").addEventListener("click", () => view.focus());

// ── Problems and findings, at their lines ──

function place(item) {
  const { doc } = view.state;
  const line = doc.line(Math.max(1, Math.min(doc.lines, Number(item.dataset.line))));
  const column = Math.max(0, Math.min(line.length, Number(item.dataset.column ?? 1) - 1));
  return { line, from: line.from + column };
}

function mark() {
  const diagnostics = [...check.querySelectorAll("[data-line]")].map((item) => {
    const { line, from } = place(item);
    const start = item.dataset.column ? from : line.from + line.text.search(/\S|$/);
    return {
      from: start,
      to: Math.max(start, line.to),
      severity: item.dataset.severity,
      message: item.querySelector(".what").textContent.trim(),
    };
  });
  view.dispatch(setDiagnostics(view.state, diagnostics));
}

check.addEventListener("click", (event) => {
  const item = event.target.closest("a")?.closest("[data-line]");
  if (!item) return;
  event.preventDefault();
  const { from } = place(item);
  view.dispatch({ selection: { anchor: from }, effects: EditorView.scrollIntoView(from, { y: "center" }) });
  view.focus();
});
check.addEventListener("htmx:afterSwap", () => { mark(); refresh(check); });
document.getElementById("preview").addEventListener("htmx:afterSettle", ({ currentTarget }) => {
  refresh(currentTarget);
  // A screen reader gets the summary, not all tables.
  const summary = currentTarget.querySelector(".problem p, .verdict, .empty")?.textContent ?? "";
  document.getElementById("said").textContent = summary.replace(/\s+/g, " ");
});
document.addEventListener("htmx:sendError", () => {
  const text = document.createElement("p");
  text.className = "verdict warn";
  text.textContent = "The service does not answer. Your draft is kept; try again.";
  check.replaceChildren(text);
});

// ── Sending ──

// Before console.js and htmx read the form.
window.addEventListener("click", (event) => {
  if (event.target.closest?.("#draft button")) sync();
}, true);
window.addEventListener("submit", (event) => {
  if (event.target === form) sync();
}, true);
// Only after the operator has confirmed it; console.js stops the event until then.
form.addEventListener("submit", (event) => {
  if (event.submitter?.dataset.apply !== undefined) keep({ applying: true });
});
window.addEventListener("pagehide", () => {
  // The last keystrokes, which no check has sent yet.
  if (isDiscarded || view.state.doc.toString() === area.value) return;
  area.value = view.state.doc.toString();
  keep();
});
reason?.addEventListener("input", () => { if (stored()) keep(); });

mark();
const isDraft = area.value !== opened || form.dataset.posted !== undefined;
if (isDraft && !check.querySelector(".verdict")) {
  // htmx listens after this module when both are new; DOMContentLoaded comes after both.
  document.addEventListener("DOMContentLoaded", () => area.dispatchEvent(new CustomEvent("draft")));
}
