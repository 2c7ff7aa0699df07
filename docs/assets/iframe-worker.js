// Browsers refuse workers in pages opened from a folder. There, the search's worker script runs in a hidden frame instead.
if (location.protocol === "file:")
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.body.appendChild(document.createElement("iframe"));
      frame.hidden = true;
      const inner = frame.contentWindow;
      inner.document.open();
      inner.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      this.loaded = new Promise((done) => (frame.onload = () => done(inner)));
      inner.document.write(`<script src="${url}"></${"script"}>`);
      inner.document.close();
    }
    postMessage(data) {
      this.loaded.then((inner) => inner.dispatchEvent(new MessageEvent("message", { data })));
    }
    terminate() {}
  };
