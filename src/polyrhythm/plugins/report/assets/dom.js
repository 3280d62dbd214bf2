// Makes the nodes of the page. Every text of a run enters the page here, as a text node: never as HTML.
"use strict";

/** An element with attributes and children; strings and numbers become text nodes, null and false nothing. */
function element(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== null && value !== false) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== false));
  return node;
}

/** A button; pressed: null for one that is no switch. */
function button(text, title, onclick, pressed = null) {
  return element("button", { type: "button", title, "aria-pressed": pressed === null ? null : String(pressed), onclick }, text);
}

/** The present value of a colour of the style sheet, such as `s3` or `rule`. */
function colourOf(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

/** One small window beside the pointer, shared by all figures. lines: texts, or [colour, text]. */
const tooltip = {
  node: null,
  show(clientX, clientY, lines) {
    if (!this.node) document.body.append((this.node = element("div", { class: "tooltip", role: "status" })));
    this.node.replaceChildren(...lines.map((line) => {
      if (!Array.isArray(line)) return element("div", {}, line);
      const key = element("i", { class: "swatch" });
      key.style.background = colourOf(line[0]);
      return element("div", {}, key, line[1]);
    }));
    this.node.hidden = false;
    const { offsetWidth: width, offsetHeight: height } = this.node;
    const left = clientX + 16 + width > innerWidth ? clientX - width - 12 : clientX + 16;
    const top = clientY + 16 + height > innerHeight ? clientY - height - 12 : clientY + 16;
    this.node.style.left = `${Math.max(4, left)}px`;
    this.node.style.top = `${Math.max(4, top)}px`;
  },
  hide() {
    if (this.node) this.node.hidden = true;
  },
};
