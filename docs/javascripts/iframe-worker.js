/* Search from file://: browsers refuse a Worker there, so the worker's script runs in a hidden frame instead.
   The name of this file tells the theme's offline plugin that no such script need be fetched. */
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.appendChild(frame);
      const inner = (this.inner = frame.contentWindow);
      inner.postMessage = (data) => {
        const message = new MessageEvent("message", { data });
        this.dispatchEvent(message);
        if (this.onmessage) this.onmessage(message);
      };
      inner.importScripts = (...urls) =>
        urls.reduce((before, one) => before.then(() => this.load(one)), Promise.resolve());
      inner.base = new URL(url, location.href).href;
      this.ready = this.load(inner.base);
    }
    load(url) {
      return new Promise((resolve, reject) => {
        const script = this.inner.document.createElement("script");
        script.src = new URL(url, this.inner.base).href;
        script.onload = resolve;
        script.onerror = reject;
        this.inner.document.body.appendChild(script);
      });
    }
    postMessage(data) {
      this.ready.then(() => this.inner.dispatchEvent(new MessageEvent("message", { data })));
    }
    terminate() {}
  };
}
