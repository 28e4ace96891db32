// Finds the model, asks for the API key where the server wants one, and starts the chat.

import { startChat } from "./chat.js";
import { ask, useKey } from "./client.js";
import { Conversation } from "./conversation.js";
import { showFigures } from "./figures.js";
import { hideError, showError, showHint } from "./notices.js";

const form = document.getElementById("key-form");
const input = document.getElementById("key");

async function start() {
  let answer;
  try {
    answer = await (await ask("/v1/models")).json();
  } catch (error) {
    form.hidden = error.status !== 401;
    if (error.status !== 401 || input.value !== "") {
      showError(error);
    }
    input.value = "";
    input.focus();
    return;
  }
  input.value = "";
  form.remove();
  hideError();
  const [model] = answer.data;
  document.getElementById("model").textContent = model.id;
  showHint(model.chat ? "" : "This model has no chat template: it continues each text.");
  startChat(new Conversation(model.id, model.chat));
  showFigures();
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  useKey(input.value);
  start();
});
start();
