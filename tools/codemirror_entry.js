// The parts of CodeMirror that the console uses. tools/vendor.py bundles them into one module.
export { Compartment, EditorState } from "@codemirror/state";
export {
  EditorView, drawSelection, highlightActiveLine, highlightActiveLineGutter,
  highlightSpecialChars, keymap, lineNumbers,
} from "@codemirror/view";
export { defaultKeymap, history, historyKeymap, indentWithTab } from "@codemirror/commands";
export {
  HighlightStyle, bracketMatching, indentOnInput, indentUnit, syntaxHighlighting,
} from "@codemirror/language";
export { forceLinting, lintGutter, lintKeymap, linter, setDiagnostics } from "@codemirror/lint";
export { MergeView, unifiedMergeView } from "@codemirror/merge";
export { searchKeymap } from "@codemirror/search";
export { yaml } from "@codemirror/lang-yaml";
export { tags } from "@lezer/highlight";
