// Lines that tell of errors, and of what the model lacks.

const error = document.getElementById("error");
const hint = document.getElementById("hint");

export function showError(what) {
  error.textContent = what.message;
  error.hidden = false;
}

export function hideError() {
  error.hidden = true;
}

export function showHint(text) {
  hint.textContent = text;
  hint.hidden = text === "";
}
