// Search runs in a worker, which no browser starts from a file. There its script runs in a hidden frame instead.
"use strict";

class FrameWorker extends EventTarget {
  constructor(url) {
    super();
    const frame = document.createElement("iframe");
    frame.hidden = true;
    document.body.append(frame);
    this.scope = frame.contentWindow;
    this.scope.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
    const script = this.scope.document.createElement("script");
    script.src = new URL(url, document.baseURI);
    this.loaded = new Promise((resolve) => script.addEventListener("load", resolve));
    this.scope.document.body.append(script);
  }

  async postMessage(data) {
    await this.loaded;
    this.scope.dispatchEvent(new MessageEvent("message", { data }));
  }
}

if (location.protocol === "file:") window.Worker = FrameWorker;
