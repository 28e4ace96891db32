// The form at the page's foot: sends a text and shows its answer as it comes.

import { ask } from "./client.js";
import { addition } from "./conversation.js";
import { documents } from "./events.js";
import { Answer, clearMessages, showUser } from "./messages.js";
import { hideError, showError } from "./notices.js";

const element = (id) => document.getElementById(id);
let conversation;
let running; // an AbortController, while an answer comes

export function startChat(made) {
  conversation = made;
  element("text").focus();
}

function options() {
  const found = {};
  for (const [field, id] of [["temperature", "temperature"], ["max_tokens", "max-tokens"]]) {
    if (element(id).value !== "") {
      found[field] = Number(element(id).value);
    }
  }
  return found;
}

async function send(text) {
  hideError();
  running = new AbortController();
  buttons();
  showUser(text);
  const answer = new Answer();
  const its = conversation; // "New chat" puts another in its place
  let said = "";
  let note = "";
  const started = performance.now();
  try {
    const [path, body] = its.request(text, options());
    const response = await ask(path, { body, signal: running.signal });
    for await (const document of documents(response)) {
      const more = addition(document);
      said += more.text;
      answer.add(more);
      if (more.tokens !== undefined) {
        const seconds = (performance.now() - started) / 1000;
        note = `${more.tokens} tokens in ${seconds.toFixed(1)} s`;
      }
    }
    its.add(text, said);
  } catch (error) {
    if (error.name === "AbortError") {
      note = "stopped";
      its.add(text, said);
    } else {
      note = "failed";
      showError(error);
    }
  }
  answer.end(note);
  running = undefined;
  buttons();
}

function buttons() {
  element("send").disabled = running !== undefined;
  element("stop").hidden = running === undefined;
}

element("chat-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = element("text").value;
  if (conversation !== undefined && running === undefined && text !== "") {
    element("text").value = "";
    send(text);
  }
});
element("text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    element("chat-form").requestSubmit();
  }
});
element("stop").addEventListener("click", () => running?.abort());
element("clear").addEventListener("click", () => {
  running?.abort();
  hideError();
  clearMessages();
  conversation = conversation?.fresh();
});
