// Requests to the server that this page came from. The API key is in this module's memory only.

let key = "";

export class ServerError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export function useKey(value) {
  key = value;
}

// Returns the answer of a request; an answer that is an error is thrown.
export async function ask(path, { body, signal } = {}) {
  const headers = key ? { authorization: `Bearer ${key}` } : {};
  const options = { headers, signal, credentials: "omit", cache: "no-store" };
  if (body !== undefined) {
    options.method = "POST";
    options.body = JSON.stringify(body);
    headers["content-type"] = "application/json";
  }
  const answer = await fetch(path, options);
  if (!answer.ok) {
    const text = await answer.text();
    throw new ServerError(answer.status, messageOf(text) ?? `The server answers ${answer.status}.`);
  }
  return answer;
}

function messageOf(text) {
  try {
    return JSON.parse(text).error.message;
  } catch {
    return undefined;
  }
}
