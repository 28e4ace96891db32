// Prometheus' text, and the figures that the page shows of two readings of it.

const LINE = /^([a-z_]+)(?:\{(.*)\})? (\S+)$/;

// Returns a function (name, part of its labels) that sums the values of a reading.
export function reading(text) {
  const rows = text.split("\n").map((line) => LINE.exec(line)).filter(Boolean);
  return (name, labels = "") =>
    rows
      .filter((row) => row[1] === name && (row[2] ?? "").includes(labels))
      .reduce((sum, row) => sum + Number(row[3]), 0);
}

// Returns figures by their names: `before` and `now` are readings, `seconds` apart.
export function figures(before, now, seconds) {
  const rate = (name) => Math.max(0, now(name) - before(name)) / seconds;
  const share = (part, whole) => (whole > 0 ? `${((100 * part) / whole).toFixed(1)}%` : "–");
  const runs = "ostinato_graph_runs_total";
  const rows = "ostinato_graph_rows_total";
  const waiting = now("ostinato_engine_requests_waiting");
  const pages = now("ostinato_engine_kv_pages");
  return {
    "tokens/s": rate("ostinato_engine_decode_tokens_total").toFixed(0),
    "prompt tokens/s": rate("ostinato_engine_prefill_tokens_total").toFixed(0),
    running: String(Math.max(0, now("ostinato_choices_admitted") - waiting)),
    queue: String(waiting),
    "graph hits": share(now(runs, 'served="replay"'), now(runs)),
    padding: share(now(rows, 'kind="padding"'), now(rows)),
    "KV cache": share(pages - now("ostinato_engine_kv_pages_free"), pages),
  };
}
