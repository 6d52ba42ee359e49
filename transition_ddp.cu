// transition_ddp.cu: what bench_fsdp.cu and train.cu take from the old bench_ddp.cu. Goes with their last use.
#include "commands.h"
#include <algorithm>

Plan plan_of(const Options& o, const Communicator& c) {
    Plan p{o};
    bool cpu = context.device == CPU, slow = cpu || c.backend == "gloo";  // through the host: 8 GB per step at size xl
    if (slow || o.quick) {
        if (cpu && o.quick && !o.has("size") && configs_of(o)[0].name != "custom") {
            p.note_smaller("4 layers of d_model 128 instead of size " + configs_of(o)[0].name);
            p.o.d_model = 128, p.o.d_ff = 512, p.o.num_layers = 4, p.o.num_heads = 4;
        }
        p.shrink_size();
        p.shrink("batch_size", &Options::batch_size, 1);
        p.shrink("context_length", &Options::context_length, o.quick && cpu ? 32 : 128);
        p.shrink("steps", &Options::steps, 3);
        p.shrink("warmup", &Options::warmup, {1});
    }
    p.choose_models();
    if (o.reduce_dtype == "bf16" && p.precisions[0] != PREC_BF16) {
        usage_error("--reduce_dtype bf16 takes --precision bf16, got %s", name_of(p.precisions[0]));
    }
    context.precision = p.precisions[0], context.mode = p.modes[0];
    return p;
}

std::string caption_of(const Plan& p, const Communicator& c, const char* command) {
    const ModelConfig& m = p.configs[0];
    std::string devices = context.device == CUDA
                              ? strprintf("%d x %s", std::min(c.world, cuda_devices()), device_description().c_str())
                              : device_description() + " per rank";
    return strprintf(
        "%s; %s, backend %s; size %s (d_model %d, %s), precision %s, mode %s%s; %s per rank, "
        "context length: %d, %d warmup, %d step; %s; commit %s%s",
        command, counted(std::to_string(c.world), "rank").c_str(), c.backend.c_str(), m.name.c_str(), m.d_model,
        counted(std::to_string(m.num_layers), "layer").c_str(), name_of(p.precisions[0]),
        caption_of(p.modes[0]).c_str(), reduced_as(p.o) == BF16 ? ", gradients reduced in bf16" : "",
        counted(std::to_string(p.o.batch_size), "sequence").c_str(), p.o.context_length, p.o.warmup[0], p.o.steps,
        devices.c_str(), commit().c_str(), p.scaled_down.c_str());
}

double passes_of(const Communicator& c, double n) { return context.device == CPU ? n * c.local_world : n; }

std::vector<std::vector<Slice>> slices_of_ranks(const Communicator& c, const std::vector<Slice>& mine) {
    std::vector<std::vector<Slice>> ranks;
    double origin = INFINITY;
    for (const std::string& bytes : gather_text(c, {(const char*)mine.data(), mine.size() * sizeof(Slice)})) {
        ranks.emplace_back(bytes.size() / sizeof(Slice));
        if (bytes.empty()) { continue; }
        memcpy((void*)ranks.back().data(), bytes.data(), bytes.size());
        origin = std::min(origin, ranks.back()[0].start);
    }
    for (std::vector<Slice>& of_rank : ranks) {
        for (Slice& s : of_rank) { s.start = (s.start - origin) / 1e6, s.end = (s.end - origin) / 1e6; }
    }
    return ranks;
}
std::vector<Row> rows_of_ranks(const std::vector<std::vector<Slice>>& ranks, bool communicate) {
    std::vector<Row> rows;
    for (size_t r = 0; r < ranks.size(); r++) {
        Row computing{strprintf("rank %zu computes", r), {}, r > 0}, communicating{"communicates", {}};
        for (const Slice& s : ranks[r]) {
            bool sent = s.colour == ALL_REDUCE_PART || s.colour == GATHER_PART;
            (sent ? communicating : computing).slices.push_back(s);
        }
        rows.push_back(computing);
        if (communicate) { rows.push_back(communicating); }
    }
    return rows;
}
