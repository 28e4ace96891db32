// ostinato._C: loads kernel libraries and passes them pointers, strides, sizes and a stream. It is
// built by the host compiler alone and links neither CUDA nor torch, so it imports on any machine.
#include "graphs/driver.h"
<<<<<<< HEAD
#include "launch.h"
#include "library.h"
=======
#include "graphs/fast_replay_type.h"
#include "graphs/run_lock.h"
#include "graphs/run_lock_guard.h"
#include "library_type.h"
>>>>>>> h/native

PYBIND11_MODULE(_C, module) {
  using py::arg;

  module.doc() = "Loads kernel libraries; pointers and streams are integers.";
  module.attr("Library") = py::reinterpret_steal<py::object>(ostinato::library::type());
  module.def("is_capturing", &ostinato::is_capturing, arg("stream"));
<<<<<<< HEAD
  py::class_<Library<W8A8GemmParams>>(module, "W8A8Gemm")
      .def(py::init<const std::string&>(), arg("path"))
      .def("prepare", &Library<W8A8GemmParams>::prepare)
      .def("launch", &ostinato::launch_w8a8_gemm, py::kw_only(), arg("x"), arg("x_stride"),
           arg("w"), arg("w_stride"), arg("x_scale"), arg("x_scale_stride"), arg("w_scale"),
           arg("w_scale_stride"), arg("out"), arg("out_stride"), arg("m"), arg("n"), arg("k"),
           arg("stream"), arg("bias") = 0, arg("x_zero_point") = 0, arg("x_zero_point_stride") = 0,
           arg("w_sum") = 0, arg("n_active") = 0, arg("tile_channels") = 0, arg("tile_tokens") = 0,
           arg("cluster") = 0, arg("share_weights") = 0, arg("split_k") = 0, arg("band") = 0,
           arg("pdl") = false, arg("best") = 0, arg("best_stride") = 0, arg("temperature") = 0,
           arg("repetition_penalty") = 0);

  py::class_<PagedDecodeLibrary>(module, "PagedDecode")
      .def(py::init<const std::string&>(), arg("path"))
      .def("prepare", &PagedDecodeLibrary::prepare)
      .def("workspace_bytes", &PagedDecodeLibrary::workspace_bytes, arg("rows"), arg("segments"),
           arg("tokens"))
      .def("launch", &ostinato::launch_paged_decode, py::kw_only(), arg("q"), arg("k_cache"),
           arg("v_cache"), arg("page_table"), arg("page_table_stride"), arg("seq_lens"), arg("out"),
           arg("workspace"), arg("batch"), arg("heads_q"), arg("heads_kv"), arg("pages"),
           arg("page_size"), arg("max_pages"), arg("max_seqlen_q"), arg("scale"), arg("stream"),
           arg("cu_seqlens_q") = 0, arg("sinks") = 0, arg("lse") = HeadsArgument(),
           arg("left") = -1, arg("right") = 0, arg("softcap") = 0.0F,
           arg("k_scale") = SlotsArgument(), arg("v_scale") = SlotsArgument(), arg("pdl") = false,
           arg("halves") = std::vector<std::uint32_t>());

  py::class_<PrefillLibrary>(module, "Prefill")
      .def(py::init<const std::string&>(), arg("path"))
      .def("prepare", &PrefillLibrary::prepare)
      .def("workspace_bytes", &PrefillLibrary::workspace_bytes)
      .def("launch", &ostinato::launch_prefill, py::kw_only(), arg("q"), arg("k"), arg("v"),
           arg("out"), arg("batch"), arg("heads_q"), arg("heads_kv"), arg("tokens_q"),
           arg("max_seqlen_q"), arg("scale"), arg("stream"), arg("workspace") = 0,
           arg("cu_seqlens_q") = 0, arg("cu_seqlens_k") = 0, arg("tokens_k") = 0,
           arg("max_seqlen_k") = 0, arg("seq_lens") = 0, arg("page_table") = 0,
           arg("page_table_stride") = 0, arg("pages") = 0, arg("page_size") = 0,
           arg("max_pages") = 0, arg("sinks") = 0, arg("lse") = HeadsArgument(), arg("left") = -1,
           arg("right") = 0, arg("softcap") = 0.0F, arg("least_rows") = 0, arg("pack") = 0,
           arg("pdl") = false, arg("q_scale") = 0, arg("k_scale") = 0, arg("v_scale") = 0,
           arg("q_scale_stride") = 0, arg("k_scale_stride") = 0, arg("v_scale_stride") = 0);

  py::class_<Library<PaddedQuantizeParams>>(module, "Quantize")
      .def(py::init<const std::string&>(), arg("path"))
      .def("prepare", &Library<PaddedQuantizeParams>::prepare)
      .def("launch", &ostinato::launch_quantize, py::kw_only(), arg("x"), arg("x_stride"),
           arg("out"), arg("out_stride"), arg("m"), arg("k"), arg("stream"), arg("scale_out") = 0,
           arg("static_scale") = 0, arg("zero_point") = 0, arg("residual") = 0,
           arg("residual_stride") = 0, arg("residual_out") = 0, arg("residual_out_stride") = 0,
           arg("norm_weight") = 0, arg("eps") = 0.0F, arg("pdl") = false, arg("n_active") = 0,
           arg("discard_x") = false);

  py::class_<Library<FusedLinearParams>>(module, "FusedLinear")
      .def(py::init<const std::string&>(), arg("path"))
      .def("prepare", &Library<FusedLinearParams>::prepare)
      .def("launch", &ostinato::launch_fused_linear, py::kw_only(), arg("x"), arg("w"),
           arg("w_scale"), arg("w_scale_stride"), arg("out"), arg("n"), arg("k"), arg("stream"),
           arg("residual") = 0, arg("residual_out") = 0, arg("norm_weight") = 0, arg("eps") = 0.0F,
           arg("bias") = 0, arg("pdl") = false);

  py::class_<Library<AppendKVParams>>(module, "AppendKV")
      .def(py::init<const std::string&>(), arg("path"))
      .def("prepare", &Library<AppendKVParams>::prepare)
      .def("launch", &ostinato::launch_append_kv, py::kw_only(), arg("k"), arg("v"), arg("k_cache"),
           arg("v_cache"), arg("slot_mapping"), arg("tokens"), arg("heads_kv"), arg("dim"),
           arg("page_size"), arg("stream"), arg("q") = HeadsArgument(),
           arg("q_out") = HeadsArgument(), arg("heads_q") = 0, arg("k_scale") = SlotsArgument(),
           arg("k_scale_per_token") = false, arg("v_scale") = SlotsArgument(),
           arg("v_scale_per_token") = false, arg("positions") = 0, arg("cos_sin") = 0,
           arg("cos_sin_stride") = 0, arg("rotary_dim") = 0, arg("interleaved") = false,
           arg("q_norm_weight") = 0, arg("q_norm_is_fp32") = false, arg("k_norm_weight") = 0,
           arg("k_norm_is_fp32") = false, arg("norm_eps") = 0.0F, arg("pdl") = false);

  py::class_<Library<EmbedParams>>(module, "Embed")
      .def(py::init<const std::string&>(), arg("path"))
      .def("prepare", &Library<EmbedParams>::prepare)
      .def("launch", &ostinato::launch_embed, py::kw_only(), arg("tokens"), arg("table"),
           arg("table_stride"), arg("out"), arg("out_stride"), arg("rows"), arg("vocabulary"),
           arg("dim"), arg("stream"), arg("seen") = 0, arg("seen_stride") = 0, arg("seen_size") = 0,
           arg("seen_rows") = 0, arg("n_active") = 0, arg("pdl") = false);

  py::class_<Library<L2ProbeParams>>(module, "L2Probe")
      .def(py::init<const std::string&>(), arg("path"))
      .def("prepare", &Library<L2ProbeParams>::prepare)
      .def("launch", &ostinato::launch_l2_probe, py::kw_only(), arg("base"), arg("offsets"),
           arg("clocks"), arg("sms"), arg("count"), arg("by_all"), arg("stream"));

  py::class_<Library<MergeStatesParams>>(module, "MergeStates")
      .def(py::init<const std::string&>(), arg("path"))
      .def("prepare", &Library<MergeStatesParams>::prepare)
      .def("launch", &ostinato::launch_merge_states, py::kw_only(), arg("o_a"), arg("lse_a"),
           arg("o_b"), arg("lse_b"), arg("out"), arg("out_lse"), arg("tokens"), arg("heads"),
           arg("dim"), arg("stream"), arg("pdl") = false);

  py::class_<Library<SampleParams>>(module, "Sample")
      .def(py::init<const std::string&>(), arg("path"))
      .def("prepare", &Library<SampleParams>::prepare)
      .def("launch", &ostinato::launch_sample, py::kw_only(), arg("logits"), arg("logits_stride"),
           arg("temperature"), arg("top_k"), arg("top_k_is_int64"), arg("top_p"), arg("min_p"),
           arg("seeds"), arg("counters"), arg("out"), arg("rows"), arg("vocabulary"), arg("stream"),
           arg("repetition_penalty") = 0, arg("seen") = 0, arg("seen_stride") = 0,
           arg("seen_rows") = 0, arg("pdl") = false, arg("best") = 0, arg("best_stride") = 0,
           arg("parts") = 0);
=======
  module.def("launch_graph", &ostinato::launch_graph, arg("executable"), arg("stream"),
             py::call_guard<py::gil_scoped_release>());

  using ostinato::Closing;
  using ostinato::Hold;
  using ostinato::RunCounts;
  using ostinato::Turn;
  module.def("note_fork", &ostinato::note_fork);
  module.attr("Repeat") = py::reinterpret_steal<py::object>(ostinato::repeat::type());
  py::class_<RunCounts>(module, "RunCounts")
      .def(py::init<>())
      .def("add", &RunCounts::add, arg("n"), arg("replayed") = true)
      .def("read", [](const RunCounts& counts) {
        return std::make_tuple(counts.hits, counts.eager, counts.rows);
      });
  py::class_<Turn>(module, "Turn")
      .def(py::init<>())
      .def("take", &Turn::take, arg("owner"), arg("what"), arg("timeout_s") = 0.0)
      .def("end", &Turn::end)
      .def("forget", &Turn::forget)
      .def_readwrite("last_stream", &Turn::last_stream)
      .def_property_readonly("owner", &Turn::owner)
      .def_property_readonly("what", &Turn::what);
  py::class_<Hold>(module, "Hold")
      .def(py::init<py::object, py::object, py::object, double, bool, py::object, py::object>(),
           arg("turn"), arg("owner"), arg("what"), arg("timeout_s") = 0.0, py::kw_only(),
           arg("is_run") = false, arg("check") = py::none(), arg("refuse"))
      .def("__enter__",
           [](const py::object& hold) {
             hold.cast<Hold&>().enter();
             return hold;
           })
      .def("__exit__", [](Hold& hold, const py::args&) { hold.exit(); })
      .def("detach", &Hold::detach)
      .def("end", &Hold::end);
  py::class_<Closing>(module, "Closing")
      .def(py::init<py::object>(), arg("turn"))
      .def("__enter__", &Closing::enter)
      .def("__exit__", [](Closing& closing, const py::args&) { closing.exit(); })
      .def("__bool__", &Closing::any);
>>>>>>> h/native
}
