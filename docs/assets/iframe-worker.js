// Browsers start no worker for a page that is read from the disk. There, a hidden frame does its work, which is the search.
// The name is the one that the theme looks for. Pages that are served keep the browser's own workers.
if (location.protocol === "file:") {
  window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super()
      this.frame = document.createElement("iframe")
      this.frame.hidden = true
      document.body.append(this.frame)
      const inside = this.frame.contentWindow
      const script = inside.document.createElement("script")
      this.ready = new Promise(resolve => script.addEventListener("load", resolve))
      inside.postMessage = data => this.#receive(structuredClone(data))
      script.src = new URL(url, location.href).href
      inside.document.head.append(script)
    }
    // As with a real worker, each side has a copy of its own, and an answer never comes in the middle of a key press.
    #receive(data) {
      setTimeout(() => {
        const event = new MessageEvent("message", { data })
        this.dispatchEvent(event)
        this.onmessage?.(event)
      })
    }
    postMessage(message) {
      const inside = this.frame.contentWindow
      const data = structuredClone(message)
      this.ready.then(() => inside.dispatchEvent(new inside.MessageEvent("message", { data })))
    }
    terminate() {
      this.frame.remove()
    }
  }
  window.Worker = window.IFrameWorker
}
