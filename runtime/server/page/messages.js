// The messages on the page. Texts of models are put in as text, never as HTML.

const list = document.getElementById("messages");

function append(parent, tag, kind, text = "") {
  const element = document.createElement(tag);
  element.className = kind;
  element.textContent = text;
  parent.append(element);
  return element;
}

export function showUser(text) {
  append(list, "li", "user", text);
}

export function clearMessages() {
  list.replaceChildren();
}

// An answer that grows.
export class Answer {
  constructor() {
    const item = append(list, "li", "assistant");
    this.reasoning = append(item, "div", "reasoning");
    this.text = append(item, "div", "text");
    this.note = append(item, "small", "note");
    item.setAttribute("aria-busy", "true");
    this.item = item;
  }

  add({ text, reasoning }) {
    this.reasoning.append(reasoning);
    this.text.append(text);
    this.item.scrollIntoView({ block: "end" });
  }

  end(note) {
    this.note.textContent = note;
    this.item.setAttribute("aria-busy", "false");
  }
}
