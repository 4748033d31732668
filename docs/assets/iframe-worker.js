// The search of the theme finds a page that has any word of the question, or a longer word. So the
// words that every page has are left out: "a" would find every word that begins with it. A plural
// finds the singular, too. Whole words count more than beginnings: "mode" more than "model".
const COMMON = new Set(
  `a an and are as at be by can do does for from have how i if in into is it its me my not of on or
  our should so that the their them then there this to was we what when where which who why will
  with you your`.split(/\s+/),
);

function searched(message) {
  if (typeof message?.data !== "string") return message;
  // The search has a syntax of its own, in which "shared://" and "Retry-" are errors.
  const given = message.data.split(/[\s:^~*+]+/).map((word) => word.replace(/^-+|-+$/g, ""));
  const words = given.filter((word) => word && !COMMON.has(word.toLowerCase()));
  if (words.length === 0) return { ...message, data: given.join(" ").trim() };
  const terms = words.map((word) => {
    if (!/^\w{3,}$/.test(word)) return word;
    const singular = word.replace(/([^s])s$/i, "$1");
    return singular === word ? `${word}^9 ${word}` : `${word}^9 ${singular}^9 ${singular}`;
  });
  return { ...message, data: terms.join(" ") };
}

const toWorker = Worker.prototype.postMessage;
Worker.prototype.postMessage = function (message, ...rest) {
  return toWorker.call(this, searched(message), ...rest);
};

// Search without a server. A browser runs no Worker in a page that was opened from the disk, so the
// search worker of the theme runs in a hidden frame instead: the same script, the same messages.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    #inner;
    #waiting = [];

    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      this.#inner = frame.contentWindow;
      this.#inner.postMessage = (data) => this.#send(this, data);
      const script = frame.contentDocument.createElement("script");
      script.src = url;
      script.onload = () => {
        this.#waiting.forEach((data) => this.#send(this.#inner, data));
        this.#waiting = null;
      };
      frame.contentDocument.body.append(script);
    }

    postMessage(message) {
      const data = searched(message);
      if (this.#waiting) this.#waiting.push(data);
      else this.#send(this.#inner, data);
    }

    #send(target, data) {
      target.dispatchEvent(new MessageEvent("message", { data }));
    }
  };
}
