// What was said so far, and the request that goes on from there.

const PATHS = { chat: "/v1/chat/completions", text: "/v1/completions" };

export class Conversation {
  // `chats`: whether the model has a chat template; without one it continues the last text.
  constructor(model, chats) {
    this.model = model;
    this.chats = chats;
    this.messages = [];
  }

  // Returns the path and the body of a request that answers a text.
  request(text, options) {
    const body = { model: this.model, stream: true, stream_options: { include_usage: true } };
    const user = { role: "user", content: text };
    const what = this.chats ? { messages: [...this.messages, user] } : { prompt: text };
    return [this.chats ? PATHS.chat : PATHS.text, { ...body, ...options, ...what }];
  }

  // Returns a conversation with the same model, in which nothing was said.
  fresh() {
    return new Conversation(this.model, this.chats);
  }

  add(text, answer) {
    this.messages.push({ role: "user", content: text }, { role: "assistant", content: answer });
  }
}

// Returns what a document of a stream adds: text, reasoning, and the number of tokens at its end.
export function addition(document) {
  const choice = document.choices[0];
  return {
    text: choice?.delta?.content ?? choice?.text ?? "",
    reasoning: choice?.delta?.reasoning_content ?? "",
    tokens: document.usage?.completion_tokens,
  };
}
