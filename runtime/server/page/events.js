// Server-sent events of an answer, as they come.

// Yields the JSON documents of a stream up to [DONE]; an event that is an error is thrown.
export async function* documents(answer) {
  for await (const data of events(answer.body)) {
    if (data === "[DONE]") {
      return;
    }
    const document = JSON.parse(data);
    if (document.error) {
      throw new Error(document.error.message);
    }
    yield document;
  }
  throw new Error("The server has broken off its answer.");
}

async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) {
        return;
      }
      const whole = (rest + value).split("\n\n");
      rest = whole.pop();
      for (const event of whole) {
        if (event.startsWith("data: ")) {
          yield event.slice("data: ".length);
        }
      }
    }
  } finally {
    await reader.cancel();
  }
}
