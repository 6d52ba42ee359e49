// bench_ddp.cu: the experiments of sections 2.1 to 3. How long an all-reduce takes; whether N ranks learn what one
// process learns; what a step costs in each way, as tables and as a picture; memory and time of the sharded optimizer.
#include "commands.h"

#include <algorithm>
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <numeric>

#include <omp.h>

// ---------------------------------------------------------------------------------------------------------------------
// distributed_communication_single_node. Bandwidths as nccl-tests define them: algbw = S / t; busbw = algbw 2(n-1)/n,
// what each link carries in a ring, which does not depend on the number of ranks n. GB = 1e9 bytes.

static const std::vector<std::string> all_reduce_columns = {"Backend",          "Device",       "Ranks",
                                                            "Tensor Size (MB)", "median ms",    "worst rank ms",
                                                            "algbw (GB/s)",     "busbw (GB/s)", "sums"};

static Plan sweep_plan(const Options& o) {
    Plan p{o};
    if (o.quick) {
        p.shrink("sizes_mb", &Options::sizes_mb, {1, 10});
        p.shrink("steps", &Options::steps, 3);
        p.shrink("warmup", &Options::warmup, {1});
        p.note_smaller("only 2 ranks");
    } else if (cuda_devices() == 0 && !gpu_is_imagined()) {
        p.shrink("sizes_mb", &Options::sizes_mb, {1, 10, 100});
    }
    for (double mb : p.o.sizes_mb) {
        if (mb * 1e6 < sizeof(float)) { usage_error("--sizes_mb: got %g, takes 4e-06 or more: one number", mb); }
    }
    return p;
}

static std::vector<double> numbers_of(const std::string& text) {
    std::vector<double> all;
    const char* p = text.c_str();
    for (char* end; *p; p = end) {
        all.push_back(strtod(p, &end));
        if (end == p) { fail("expected numbers, found '%s'", text.c_str()); }
    }
    return all;
}

// Bytes on a rank's device. On the CPU there is what came from the host, and the tensor.
static size_t tensors_of(double mb) { return (size_t)(mb * 1e6) * (context.device == CPU ? 2 : 1); }

// Times in ms of an all-reduce of n fp32 numbers, by rank and step. *ok: the sums were right on all ranks.
static std::vector<std::vector<double>> time_all_reduce(const Communicator& c, int64_t n, int warmup, int steps,
                                                        bool* ok) {
    require_memory(tensors_of(n * sizeof(float) / 1e6) * c.local_world, "the tensors of this machine's ranks");
    barrier(c);  // all ranks look before one takes its share
    std::vector<float> host(n);
    for (int64_t i = 0; i < n; i++) { host[i] = (float)(i % 1000 + c.rank); }
    Tensor t = empty({n}, F32, WORKSPACE);
    copy_bytes(t.data, context.device, host.data(), CPU, n * sizeof(float));
    wait(c, all_reduce(c, t, SUM));
    synchronize();
    copy_bytes(host.data(), CPU, t.data, context.device, n * sizeof(float));
    bool right = true;
    for (int64_t i = 0; i < n; i++) {
        right = right && host[i] == (float)(c.world * (i % 1000) + c.world * (c.world - 1) / 2);
    }
    scale_in_place(t, 1e-20f);  // each further sum multiplies by up to the number of ranks
    std::string mine;
    for (int i = 0; i < warmup + steps; i++) {
        barrier(c);
        double start = now_ms();
        wait(c, all_reduce(c, t, SUM));
        synchronize();
        if (i >= warmup) { mine += strprintf(" %.17g", now_ms() - start); }
    }
    std::vector<std::vector<double>> all;
    *ok = true;
    for (const std::string& text : gather_text(c, (right ? "1" : "0") + mine)) {
        all.push_back(numbers_of(text));
        *ok = *ok && all.back()[0] == 1;
        all.back().erase(all.back().begin());
    }
    return all;
}

static std::string caption_of(const Plan& p) {
    return strprintf(
        "distributed_communication_single_node: all-reduce, float32; MB = 1e6 bytes; %s, %s, a "
        "barrier before each, median over steps and ranks; %s",
        counted(std::to_string(p.o.warmup[0]), "warm-up").c_str(), counted(std::to_string(p.o.steps), "step").c_str(),
        p.origin().c_str());
}

static bool all_reduce_rows(const Communicator& c, const Options& o, Table* table) {
    bool all_ok = true;
    for (double mb : o.sizes_mb) {
        const Prediction needs{tensors_of(mb), 0};
        std::string row =
            strprintf("%g MB, %d ranks, %s on %s", mb, c.world, c.backend.c_str(), name_of(context.device));
        if (only_planned(row, needs, fits_everywhere(c, needs.bytes), 1)) { continue; }
        bool ok;
        int64_t n = (int64_t)(mb * 1e6 / sizeof(float));
        std::vector<double> all, medians;
        for (const std::vector<double>& of_rank : time_all_reduce(c, n, o.warmup[0], o.steps, &ok)) {
            all.insert(all.end(), of_rank.begin(), of_rank.end());
            medians.push_back(stats_of(of_rank).median);
        }
        double t = stats_of(all).median, algbw = n * sizeof(float) / t / 1e6;
        table->rows.push_back({c.backend, name_of(context.device), std::to_string(c.world), strprintf("%g", mb),
                               strprintf("%.3f", t), strprintf("%.3f", stats_of(medians).max), strprintf("%.2f", algbw),
                               strprintf("%.2f", algbw * 2 * (c.world - 1) / c.world), ok ? "right" : "WRONG"});
        all_ok = all_ok && ok;
    }
    return all_ok;
}

// A group of ranks is a run of its own: its table's rows, or one that says why it cannot be.
static void group_rows(const Options& o, const char* backend, Device device, int n, Table* table) {
    if (context.plan_only) {
        RestoreContext restore;
        if (device == CPU && gpu_is_imagined()) { context.memory = SIZE_MAX; }  // --memory is the GPU's
        bool runs = gpu_is_imagined() || why_not(backend, device, n).empty();
        Communicator group;
        group.world = group.local_world = n, group.backend = backend;
        context.device = device;
        if (runs) { all_reduce_rows(group, o, table); }
        return;
    }
    std::string why = why_not(backend, device, n);
    if (!why.empty()) {
        table->rows.push_back({backend, name_of(device), std::to_string(n), "all", "", "", "", "", why});
        return;
    }
    std::string sizes;
    for (double mb : o.sizes_mb) { sizes += (sizes.empty() ? "" : ",") + strprintf("%g", mb); }
    progress("all-reduce: %s, %d ranks", backend, n);
    Table part = read_csv(run_ourselves({"distributed_communication_single_node", "--nproc", std::to_string(n),
                                         "--backend", backend, "--device", name_of(device), "--sizes_mb", sizes,
                                         "--warmup", std::to_string(o.warmup[0]), "--steps", std::to_string(o.steps),
                                         "--timeout", strprintf("%g", o.timeout), "--format", "csv"}));
    if (part.columns != table->columns) { fail("the measuring ranks printed '%s'", part.caption.c_str()); }
    table->rows.insert(table->rows.end(), part.rows.begin(), part.rows.end());
}

static void plot_all_reduce(const Options& o, const Table& table) {
    if (o.plot.empty()) { return; }
    std::map<double, std::map<std::string, double>> ms;  // by size and group
    std::set<std::string> groups;
    for (const auto& row : table.rows) {
        std::string group = row[0] + " " + row[1] + ", " + row[2] + " ranks";
        if (row[4].empty()) { continue; }  // could not run here
        groups.insert(group);
        ms[strtod(row[3].c_str(), nullptr)][group] = strtod(row[4].c_str(), nullptr);
    }
    Chart chart{Chart::LINES, "", "tensor size (MB)", "median time (ms)", {}, {}, {}, true, true};
    for (const std::string& group : groups) { chart.series.push_back({group, {}}); }
    for (auto& [mb, times] : ms) {
        chart.x.push_back(mb);
        for (Series& series : chart.series) { series.y.push_back(times.count(series.name) ? times[series.name] : NAN); }
    }
    save_file(o.plot, draw("All-reduce: time against size", table.caption, {chart}));
}

int cmd_distributed_communication_single_node(const Options& o) {
    if (context.plan_only) { context.device = choose_device(o.device); }
    Plan p = sweep_plan(o);
    if (is_rank() || o.has("nproc") || o.backend != "auto") {  // one group
        return run_ranks(o, [&](const Communicator& c) {
            Table table{"", all_reduce_columns, {}};
            bool ok = all_reduce_rows(c, p.o, &table);
            table.caption = caption_of(p);
            if (c.rank == 0) {
                print(table, o.format);
                plot_all_reduce(o, table);
            }
            if (!ok) { fail("wrong sums"); }
        });
    }
    Table table{"", all_reduce_columns, {}};
    std::vector<int> ranks = {2};
    if (!o.quick) { ranks = {2, 4, 6}; }
    if (!o.quick && cuda_devices() >= 8) { ranks.push_back(8); }  // more than the handout asks for
    if (o.device != "cuda") {
        for (int n : ranks) { group_rows(p.o, "gloo", CPU, n, &table); }
    }
    if (o.device != "cpu") {
        for (int n : ranks) { group_rows(p.o, "nccl", CUDA, n, &table); }
    }
    if (!context.plan_only) { context.device = cuda_devices() > 0 && o.device != "cpu" ? CUDA : CPU; }
    table.caption = caption_of(p);
    print(table, o.format);

    Table handout{"the same, median ms; commit " + commit(), {"Backend", "Device", "Tensor Size (MB)"}, {}};
    for (int n : ranks) { handout.columns.push_back(strprintf("%d Procs", n)); }
    std::map<std::string, std::map<std::string, std::string>> cells;  // backend and size, ranks
    for (const auto& row : table.rows) { cells[row[0] + row[3]][row[2]] = row[4]; }
    for (const char* backend : {"gloo", "nccl"}) {
        for (double mb : p.o.sizes_mb) {
            std::string size = strprintf("%g", mb);
            if (!cells.count(backend + size)) { continue; }
            handout.rows.push_back({backend, strcmp(backend, "gloo") == 0 ? "cpu" : "cuda", size});
            for (int n : ranks) { handout.rows.back().push_back(cells[backend + size][std::to_string(n)]); }
        }
    }
    if (!handout.rows.empty()) { print(handout, o.format); }
    plot_all_reduce(o, table);
    return 0;
}

// ---------------------------------------------------------------------------------------------------------------------
// Models to train, as flat weights and gradients: the public tests' toy models, one with parameters that have no
// gradient, one with two layers that share their weight, and a small Transformer.

struct Trainee {
    std::string name;
    std::vector<Parameter> parameters;  // with gradients, in backward order
    std::vector<Tensor> slots;
    Tensor weights, gradients;  // weights may be longer: those without gradients come last
    Model lm;                   // of the Transformer only
    std::map<std::string, Tensor> by_name;
};

static int toy_outputs(const Options& o) { return o.edition == "2026" ? 10 : 5; }
static Trainee make_toy(bool tied, const Options& o, uint64_t seed) {
    struct Toy {
        const char* name;
        Shape shape;
        bool has_gradient;
    };
    std::vector<Toy> plain = {{"fc3.weight", {toy_outputs(o), 50}, true},
                              {"fc2.fc.weight", {50, 10}, true},
                              {"fc1.weight", {10, 10}, true},
                              {"fc2.fc.bias", {50}, false},
                              {"no_grad_fixed_param", {2}, false}};
    std::vector<Toy> sharing = {{"fc5.weight", {toy_outputs(o), 50}, true},
                                {"fc3.weight", {10, 50}, true},
                                {"fc2.weight = fc4.weight", {50, 10}, true},
                                {"fc1.weight", {10, 10}, true}};
    Trainee t;
    t.name = tied ? "ToyModelWithTiedWeights" : "ToyModel";
    int64_t all = 0, with_gradient = 0;
    for (const Toy& toy : tied ? sharing : plain) {
        all += count(toy.shape);
        with_gradient += toy.has_gradient ? count(toy.shape) : 0;
    }
    t.weights = empty({all}, F32, PARAMETERS);
    t.gradients = zeros({with_gradient}, F32, GRADIENTS);
    fill_normal(t.weights, seed, key_of(t.name), 0, 0.3f);
    int64_t offset = 0;
    for (const Toy& toy : tied ? sharing : plain) {
        Tensor weight = view(t.weights, offset, toy.shape);
        if (toy.has_gradient) {
            weight = require_gradient(weight);
            weight.gradient->is_parameter = true;
            weight.gradient->value = view(t.gradients, offset, toy.shape);
            t.parameters.push_back({toy.name, toy.shape, offset, weight});
            t.slots.push_back(weight);
        }
        t.by_name[toy.name] = weight;
        offset += count(toy.shape);
    }
    return t;
}
static Trainee make_lm(uint64_t seed) {
    Trainee t;
    t.lm = make_model({"lm", 64, 128, 2, 4, 100});
    init_weights(t.lm, seed);
    make_gradients(t.lm);
    t.name = "Transformer, d_model 64, 2 layers";
    t.parameters = t.lm.parameters, t.slots = t.lm.slots;
    t.weights = t.lm.weights, t.gradients = t.lm.gradients;
    return t;
}

// The mean loss over rows [first, first + rows) of step's batch of random data, and its gradients.
static double loss_and_gradients(Trainee& t, uint64_t seed, int step, int64_t first, int64_t rows, int64_t all) {
    for (const Tensor& slot : t.slots) { slot.gradient->filled = false; }
    Tensor loss;
    auto part = [&](const char* what, int64_t width) {
        Tensor whole = empty({all, width}, F32, INPUTS);
        fill_normal(whole, seed, key_of(what) + step, 0, 1);
        return view(whole, first * width, {rows, width});
    };
    if (t.lm.weights) {
        Batch b = random_batch((int)all, 16, t.lm.config.vocab_size, seed + step);
        loss = cross_entropy(forward(t.lm, view(b.tokens, first * 16, {rows, 16})),
                             view(b.targets, first * 16, {rows, 16}));
    } else {
        auto& w = t.by_name;
        bool tied = w.count("fc5.weight") > 0;
        Tensor x = relu(linear(part("x", 10), w["fc1.weight"]));
        if (tied) {
            const Tensor& shared = w["fc2.weight = fc4.weight"];
            x = relu(linear(relu(linear(x, shared)), w["fc3.weight"]));
            x = linear(relu(linear(x, shared)), w["fc5.weight"]);
        } else {
            x = linear(relu(add(linear(x, w["fc2.fc.weight"]), w["fc2.fc.bias"])), w["fc3.weight"]);
        }
        loss = mean_all(square(sub(x, part("y", x.dim(-1)))));
    }
    double value = to_doubles(loss)[0];
    backward(loss);
    drop_weight_copies(t.slots);
    return value;
}

// ---------------------------------------------------------------------------------------------------------------------
// naive_ddp, ddp_overlap_individual_parameters, ddp_overlap_bucketed: N ranks against one process that sees the whole
// batch. Each rank starts from other weights, so that the broadcast is tested too. The weights are equal but for
// rounding: the sum over the batch is taken in another order.

static bool same_bits_everywhere(const Communicator& c, const Tensor& t) {
    Tensor host = to_device(t, CPU);
    std::string bytes(host.data, host.size() * size_of(host.dtype));
    std::string mine = std::to_string(key_of(bytes));
    for (const std::string& other : gather_text(c, mine)) {
        if (other != mine) { return false; }
    }
    return true;
}

struct Difference {
    double max = 0, sum = 0;
    int64_t wrong = 0, n = 0;
};
static void add_difference(Difference& d, const Tensor& got, const Tensor& want) {
    std::vector<double> a = to_doubles(got), b = to_doubles(want);
    for (size_t i = 0; i < a.size(); i++) {
        double difference = std::fabs(a[i] - b[i]);
        d.wrong += !(difference <= 1e-6 + 1e-5 * std::fabs(b[i]));  // NaN is wrong
        d.max = difference > d.max || std::isnan(difference) ? difference : d.max;
        d.sum += difference, d.n++;
    }
}

constexpr int STEPS = 5, ROWS_A_RANK = 10;

static bool train_and_compare(const Communicator& c, Strategy strategy, double bucket_mb, const Options& o, int model,
                              Table* table) {
    auto make = [&](uint64_t seed) { return model == 2 ? make_lm(seed) : make_toy(model == 1, o, seed); };
    Trainee ours = make(o.seed + c.rank), reference = make(o.seed);
    auto d = data_parallel(c, strategy, bucket_mb, ours.weights, ours.gradients, ours.parameters, ours.slots);
    Optimizer sgd{c, UNSHARDED, {}}, reference_sgd{c, UNSHARDED, {}};
    auto group = [](const Trainee& t) {
        ParameterGroup g{view(t.weights, 0, t.gradients.shape), t.gradients};
        g.sgd = true, g.adamw.lr = 0.1f, g.adamw.weight_decay = 0, g.momentum = 0;
        return g;
    };
    add_parameter_group(sgd, group(ours)), add_parameter_group(reference_sgd, group(reference));
    std::vector<Difference> differences(ours.parameters.size());
    int64_t all = (int64_t)ROWS_A_RANK * c.world;
    size_t calls = 0;
    for (int step = 0; step < STEPS; step++) {
        begin_step(*d);
        loss_and_gradients(ours, o.seed, step, (int64_t)c.rank * ROWS_A_RANK, ROWS_A_RANK, all);
        finish_gradient_synchronization(*d);
        optimizer_step(sgd);
        calls = d->works.size();
        loss_and_gradients(reference, o.seed, step, 0, all, all);
        optimizer_step(reference_sgd);
        for (size_t i = 0; i < ours.parameters.size(); i++) {
            add_difference(differences[i], ours.parameters[i].weight, reference.parameters[i].weight);
        }
    }
    Difference frozen;  // broadcast at the start, then untouched
    int64_t trained = ours.gradients.size(), rest = ours.weights.size() - trained;
    if (rest > 0) {
        add_difference(frozen, view(ours.weights, trained, {rest}), view(reference.weights, trained, {rest}));
    }
    bool same = same_bits_everywhere(c, ours.weights), all_match = same;
    auto row = [&](const std::string& parameter, const Difference& x) {
        bool match = x.wrong == 0;
        all_match = all_match && match;
        table->rows.push_back({ours.name, strategy == BUCKETED ? strprintf("%g", bucket_mb) : "", std::to_string(calls),
                               parameter, strprintf("%.2e", x.max), strprintf("%.2e", x.sum / x.n),
                               match ? "match" : "DIFFER", same ? "identical" : "DIFFER"});
    };
    if (model == 2) {
        Difference together;
        for (const Difference& x : differences) {
            together.max = std::max(together.max, x.max), together.sum += x.sum, together.n += x.n;
            together.wrong += x.wrong;
        }
        row(strprintf("all %zu", differences.size()), together);
    } else {
        for (size_t i = 0; i < differences.size(); i++) { row(ours.parameters[i].name, differences[i]); }
        if (frozen.n > 0) { row("without gradient", frozen); }
    }
    std::string verdicts;
    for (const std::string& v : gather_text(c, all_match ? "" : "x")) { verdicts += v; }
    return verdicts.empty();
}

static int check_strategy(const Options& o, const char* command, Strategy strategy, std::vector<double> bucket_mb) {
    return run_ranks(o, [&](const Communicator& c) {
        Table table{
            strprintf("%s: weights of data parallel against single-process training after each of %d steps; World "
                      "size: %d, Batch size: %d, SGD, Learning rate: 0.1; toy models with %d outputs; backend %s; %s; "
                      "commit %s",
                      command, STEPS, c.world, ROWS_A_RANK * c.world, toy_outputs(o), c.backend.c_str(),
                      device_description().c_str(), commit().c_str()),
            {"Model", "Bucket (MB)", "all-reduces per step", "Parameter", "max diff", "mean diff", "Parameters",
             "bits on all ranks"},
            {}};
        bool ok = true;
        for (int model = 0; model < 3; model++) {
            for (double mb : bucket_mb) {  // the Transformer's smallest matrix has 0.016 MB
                ok = train_and_compare(c, strategy, model == 2 ? 100 * mb : mb, o, model, &table) && ok;
            }
        }
        if (c.rank == 0) { print(table, o.format); }
        if (!ok) { fail("data parallel training does not give the weights of single-process training"); }
    });
}
int cmd_naive_ddp(const Options& o) { return check_strategy(o, "naive_ddp", NAIVE, {0}); }
int cmd_ddp_overlap_individual_parameters(const Options& o) {
    return check_strategy(o, "ddp_overlap_individual_parameters", OVERLAPPED, {0});
}
int cmd_ddp_overlap_bucketed(const Options& o) {
    return check_strategy(o, "ddp_overlap_bucketed", BUCKETED, o.bucket_size_mb);
}

// ---------------------------------------------------------------------------------------------------------------------
// The benchmarking commands. A step's times come from marks on the device's time line, so that nothing waits in
// between:
//   | forward | backward          | exposed | optimizer |      compute stream
//             |   [all-reduce][all-reduce]  |                  communication stream: hidden, as far as under backward
// Hidden share = communication time under backward / communication time.

// One model, in one precision and mode.
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
DType reduced_as(const Options& o) { return o.reduce_dtype == "bf16" ? BF16 : F32; }
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

struct StepTimes {  // ms
    double total, forward, backward, exposed, optimizer, communication, hidden, loss;
};
struct Variant {
    Strategy strategy;
    double bucket_mb;
    int calls = 0;
    double bytes = 0;  // reduced per step
    std::vector<StepTimes> steps{};
};

static StepTimes timed_step(Model& model, DataParallel& d, const Batch& batch, float loss_scale,
                            const std::function<void()>& optimizer) {
    begin_step(d);
    barrier(d.c);
    double start = now_ms();
    Mark origin = mark(), middle;
    Tensor loss = forward_backward(model, batch, loss_scale, [&] { middle = mark(); });
    Mark finished = mark();
    finish_gradient_synchronization(d);
    Mark synchronized = mark();
    optimizer();
    Mark end = mark();
    synchronize();
    StepTimes t{};
    t.total = now_ms() - start;
    double begin = ms_of(middle, origin), stop = ms_of(finished, origin);
    t.forward = begin, t.backward = stop - begin;
    t.exposed = ms_of(synchronized, finished), t.optimizer = ms_of(end, synchronized);
    for (const WorkPtr& work : d.works) {
        double from = ms_of(work->begin, origin), to = ms_of(work->end, origin);
        t.communication += to - from;
        t.hidden += std::max(0.0, std::min(to, stop) - std::max(from, begin));
    }
    t.loss = to_doubles(loss)[0];
    return t;
}

// Every rank's numbers, averaged over the ranks.
static std::vector<StepTimes> mean_over_ranks(const Communicator& c, std::vector<StepTimes> mine) {
    constexpr size_t N = sizeof(StepTimes) / sizeof(double);
    std::string bytes((const char*)mine.data(), mine.size() * sizeof(StepTimes));
    for (StepTimes& t : mine) { t = StepTimes(); }
    for (const std::string& other : gather_text(c, bytes)) {
        for (size_t i = 0; i < mine.size() * N; i++) {
            double value;
            memcpy(&value, other.data() + i * sizeof(double), sizeof(double));
            ((double*)mine.data())[i] += value / c.world;
        }
    }
    return mine;
}

// traces, if not null, gets the trace of one more step, which is not timed.
static void measure(const Communicator& c, const Plan& p, Model& model, const Batch& batch, Variant& v,
                    std::vector<Trace>* traces) {
    auto d = data_parallel(c, v.strategy, v.bucket_mb, model.weights, model.gradients, model.parameters, model.slots);
    LossScaler scaler;
    // Each rank begins alike: data_parallel has sent rank 0's weights, and "no sync" left each its own moments.
    if (model.m) { fill_zero(model.m), fill_zero(model.v); }
    model.step = 0;
    for (int i = 0; i < p.o.warmup[0] + p.o.steps; i++) {
        StepTimes t =
            timed_step(model, *d, batch, loss_scale_of(scaler), [&] { optimizer_step(model, AdamW(), scaler, 0); });
        if (c.rank == 0) { progress("%s: %d of %d", name_of(v.strategy), i + 1, p.o.warmup[0] + p.o.steps); }
        if (i >= p.o.warmup[0]) { v.steps.push_back(t); }
    }
    if (traces) {
        start_tracing();
        {
            Range range(name_of(v.strategy));
            timed_step(model, *d, batch, loss_scale_of(scaler), [&] { optimizer_step(model, AdamW(), scaler, 0); });
        }
        traces->push_back(stop_tracing());
    }
    v.calls = (int)d->works.size();
    for (const WorkPtr& work : d->works) { v.bytes += (double)work->bytes; }
    v.steps = mean_over_ranks(c, v.steps);
}

static Stats stats_of(const Variant& v, double StepTimes::*field) {
    std::vector<double> values;
    for (const StepTimes& t : v.steps) { values.push_back(t.*field); }
    return stats_of(values);
}
static double mean_of(const Variant& v, double StepTimes::*field) { return stats_of(v, field).mean; }
static std::string label_of(const Variant& v) {
    return v.strategy == BUCKETED ? strprintf("bucketed, %g MB", v.bucket_mb) : name_of(v.strategy);
}

static Table comparison_table(const std::string& caption, const std::vector<Variant>& variants, const Plan& p,
                              const Communicator& c) {
    Table table{caption,
                {"Strategy", "Total Time (ms)", "std", "Forward (ms)", "Backward (ms)", "Exposed Comm (ms)",
                 "Comm Prop.", "Optimizer (ms)", "Comm Time (ms)", "hidden", "all-reduces", "MB per step",
                 "Tokens/second", "MFU %", "step / no sync"},
                {}};
    double floor = 0;
    for (const Variant& v : variants) { floor = v.strategy == NO_SYNC ? mean_of(v, &StepTimes::total) : floor; }
    for (const Variant& v : variants) {
        Stats total = stats_of(v, &StepTimes::total);
        double exposed = mean_of(v, &StepTimes::exposed), all = mean_of(v, &StepTimes::communication);
        auto ms = [&](double StepTimes::*field) { return strprintf("%.2f", mean_of(v, field)); };
        table.rows.push_back({label_of(v), strprintf("%.2f", total.mean), strprintf("%.2f", total.std),
                              ms(&StepTimes::forward), ms(&StepTimes::backward), strprintf("%.2f", exposed),
                              strprintf("%.1f%%", 100 * exposed / total.mean), ms(&StepTimes::optimizer),
                              strprintf("%.2f", all),
                              all > 0 ? strprintf("%.1f%%", 100 * mean_of(v, &StepTimes::hidden) / all) : "",
                              std::to_string(v.calls), strprintf("%.1f", v.bytes / 1e6),
                              strprintf("%.0f", 1e3 * p.o.batch_size * p.o.context_length * c.world / total.mean),
                              percent_of_peak(step_tflops(p.configs[0], p.o.batch_size, p.o.context_length, total.mean),
                                              context.precision),
                              floor > 0 ? strprintf("%.3f", total.mean / floor) : ""});
    }
    return table;
}

// The write-ups' layout: a line per step, then blocks.
static void print_step_lines(const Variant& v) {
    int n = (int)v.steps.size();
    printf("\n%s:\n", label_of(v).c_str());
    for (int i = 0; i < n; i++) {
        const StepTimes& t = v.steps[i];
        printf(
            "Step %2d/%d: Total: %.4fs, Forward: %.4fs, Backward: %.4fs, Comm: %.4fs (%.1f%%), Calls: %d, Loss: %.4f\n",
            i + 1, n, t.total / 1e3, t.forward / 1e3, t.backward / 1e3, t.exposed / 1e3, 100 * t.exposed / t.total,
            v.calls, t.loss);
    }
}
static void print_blocks(const Variant& v, const Plan& p, const Communicator& c, int64_t parameters) {
    auto line = [&](const char* what, double StepTimes::*field, bool share) {
        Stats x = stats_of(v, field);
        printf("%s %.4f ± %.4f seconds%s\n", what, x.mean / 1e3, x.std / 1e3,
               share ? strprintf(" (%.1f%%)", 100 * x.mean / mean_of(v, &StepTimes::total)).c_str() : "");
    };
    double total = mean_of(v, &StepTimes::total);
    printf("\nModel Configuration:\n  Model: %s (%dd, %d layers, %d heads)\n  Parameters: %" PRId64
           "\n  Sequence length: %d\n",
           p.configs[0].name.c_str(), p.configs[0].d_model, p.configs[0].num_layers, p.configs[0].num_heads, parameters,
           p.o.context_length);
    printf(
        "\nTraining Configuration:\n  Setup: %d ranks, %s\n  Batch size per rank: %d\n  Effective batch size: %d\n"
        "  Optimizer: AdamW\n",
        c.world, c.backend.c_str(), p.o.batch_size, p.o.batch_size * c.world);
    printf("\nTiming Results, %s (averaged over %zu steps):\n", label_of(v).c_str(), v.steps.size());
    line("  Total time per step:    ", &StepTimes::total, false);
    line("    - Forward pass:       ", &StepTimes::forward, true);
    line("    - Backward pass:      ", &StepTimes::backward, true);
    line("    - Communication:      ", &StepTimes::exposed, true);
    line("    - Optimizer step:     ", &StepTimes::optimizer, true);
    printf(
        "\nCommunication Analysis:\n  Average gradient data transferred: %.1f MB per step\n  Communication calls: %d "
        "per "
        "step\n  Communication overhead: %.1f%% of total step time\n",
        v.bytes / 1e6, v.calls, 100 * mean_of(v, &StepTimes::exposed) / total);
    printf("\nPerformance Metrics:\n  Throughput: %.1f samples/second\n  Tokens/second: %.0f\n",
           1e3 * p.o.batch_size * c.world / total, 1e3 * p.o.batch_size * c.world * p.o.context_length / total);
}
static void print_comparison(const Variant& a, const Variant& b) {
    auto better = [&](double StepTimes::*field) { return 100 * (1 - mean_of(b, field) / mean_of(a, field)); };
    printf("\nCOMPARISON RESULTS: %s against %s\n", label_of(a).c_str(), label_of(b).c_str());
    printf("Step time improvement:        %+.1f%%\n", better(&StepTimes::total));
    printf("Communication time reduction: %+.1f%%\n", better(&StepTimes::exposed));
    printf("Throughput improvement:       %+.1f%%\n",
           100 * (mean_of(a, &StepTimes::total) / mean_of(b, &StepTimes::total) - 1));
    printf("Communication calls reduced:  %d → %d (%+d)\n", a.calls, b.calls, b.calls - a.calls);
}

// One process with the whole batch and, on the CPU, all cores; the other ranks wait.
static Stats single_process(const Communicator& c, const Plan& p, Model& model, uint64_t seed) {
    std::vector<double> times = {0};
    if (c.rank == 0) {
        int threads = omp_get_max_threads();
        omp_set_num_threads(omp_get_num_procs());
        Batch batch = random_batch(p.o.batch_size * c.world, p.o.context_length, p.configs[0].vocab_size, seed);
        try {
            times = time_ms(p.o.warmup[0], p.o.steps, [&] {
                forward_backward(model, batch, 1);
                adamw_step(model, AdamW());
            });
        } catch (const OutOfMemory&) {  // the batch of many ranks may be too large for one
            clear_tape(), times = {NAN};
        }
        omp_set_num_threads(threads);
    }
    gather_text(c, "");
    return stats_of(times);
}

// t = o + s / w, the line through the measured all-reduces with the least relative errors: ms, and bytes per ms.
struct Line {
    double overhead, bandwidth;
};
static Line fit_line(const std::vector<double>& bytes, const std::vector<double>& ms) {
    double s0 = 0, s1 = 0, s2 = 0, t0 = 0, t1 = 0;
    for (size_t i = 0; i < ms.size(); i++) {
        double weight = 1 / (ms[i] * ms[i]);
        s0 += weight, s1 += weight * bytes[i], s2 += weight * bytes[i] * bytes[i];
        t0 += weight * ms[i], t1 += weight * ms[i] * bytes[i];
    }
    double slope = (s0 * t1 - s1 * t0) / (s0 * s2 - s1 * s1);
    return {(t0 - slope * s1) / s0, 1 / slope};
}

// overhead(s, w, o, n) = s / (n w) + n o: the last bucket cannot hide, and each call costs o. It is least at the bucket
// size sqrt(s o w).
static Table bucket_model(const Communicator& c, const std::vector<Variant>& variants, double bytes, bool quick) {
    std::vector<double> sizes, times;
    for (double mb : {0.25, 1.0, 4.0, 16.0, 64.0, 256.0}) {
        if (mb * 1e6 > std::max(bytes, 1e6) || (quick && mb > 16)) { continue; }
        bool ok;
        std::vector<double> all;
        for (const auto& of_rank : time_all_reduce(c, (int64_t)(mb * 1e6 / 4), 3, 7, &ok)) {
            all.insert(all.end(), of_rank.begin(), of_rank.end());
        }
        sizes.push_back(mb * 1e6), times.push_back(stats_of(all).min);  // what disturbs only adds
    }
    Line fit = fit_line(sizes, times);
    double o = std::max(fit.overhead, 0.0), w = fit.bandwidth;
    double best = sqrt(bytes * o * w);
    bool fits = std::isfinite(w) && w > 0;  // else noise made the larger ones as fast as the smaller ones
    std::string line = strprintf(
        "o = %.1f us, w = %.2f GB/s (algbw); least, %.2f ms, with buckets of sqrt(s o w) = "
        "%.1f MB",
        1e3 * o, w / 1e6, 2 * sqrt(bytes * o / w), best / 1e6);
    Table table{
        strprintf("DDP overhead s/(n_b w) + n_b o with s = %.1f MB, and from all-reduces of %g to %g MB: %s; measured "
                  "overhead = exposed communication; commit %s",
                  bytes / 1e6, sizes.front() / 1e6, sizes.back() / 1e6,
                  fits ? line.c_str() : "no w, they took no longer", commit().c_str()),
        {"Bucket Size (MB)", "Total Time (ms)", "n_b", "model's overhead (ms)", "measured (ms)"},
        {}};
    for (const Variant& v : variants) {
        if (v.strategy != BUCKETED) { continue; }
        table.rows.push_back({strprintf("%g", v.bucket_mb), strprintf("%.2f", mean_of(v, &StepTimes::total)),
                              std::to_string(v.calls),
                              fits ? strprintf("%.2f", bytes / (v.calls * w) + v.calls * o) : "",
                              strprintf("%.2f", mean_of(v, &StepTimes::exposed))});
    }
    return table;
}

bool fits_everywhere(const Communicator& c, size_t bytes) {
    int gpus = gpu_is_imagined() ? c.local_world : std::max(1, cuda_devices());
    size_t sharing = context.device == CUDA ? (c.local_world + gpus - 1) / gpus : c.local_world;
    bool fits_here = bytes * sharing <= available_memory(context.device);
    if (!c.links) { return fits_here; }  // one rank, or a plan
    std::string somewhere;
    for (const std::string& no : gather_text(c, fits_here ? "" : "x")) { somewhere += no; }
    return somewhere.empty();
}

static Prediction step_needs(const Plan& p, bool split) {
    return planned_peak([&] {
        Model model = make_model(p.configs[0]);
        if (split) { choose_form(model); }
        make_gradients(model, reduced_as(p.o));
        LossScaler scaler;
        run_phase(STEP, model, random_batch(p.o.batch_size, p.o.context_length, p.configs[0].vocab_size, 0), scaler);
    });
}
// What several ranks run, with a default size that fits on all of them.
Plan fitting_plan(const Options& o, const Communicator& c, bool split) {
    Plan p = plan_of(o, c);
    p.shrink_to_fit(1, [&](const Plan& smaller) { return fits_everywhere(c, step_needs(smaller, split).bytes); });
    return p;
}

double passes_of(const Communicator& c, double n) { return context.device == CPU ? n * c.local_world : n; }

struct PlannedWay {
    std::string label;
    double shared = 0;  // bytes of which a rank keeps only its part
};
static Prediction needs_of(const PlannedWay& way, Prediction plain, const Communicator& c) {
    plain.bytes -= (size_t)(way.shared * (c.world - 1) / c.world);
    return plain;
}
// True: a step that shares nothing would not fit on one of the ranks, and no way is run. The table then says so, and
// what the step would have taken.
static bool too_large(const Communicator& c, const Plan& p, const Table& without_rows,
                      const std::vector<PlannedWay>& ways, const std::string& format, bool split) {
    const Prediction needs = step_needs(p, split);
    const bool fits = fits_everywhere(c, needs.bytes);
    double steps = passes_of(c, p.o.warmup[0] + p.o.steps);
    for (size_t i = 0, end; i < ways.size(); i = end) {  // those that need the same are one row
        std::string labels = ways[i].label;
        for (end = i + 1; end < ways.size() && ways[end].shared == ways[i].shared; end++) {
            labels += " + " + ways[end].label;
        }
        only_planned(labels + ", " + ranks_of(c) + row_of(p.configs[0], p.o.batch_size, p.o.context_length, STEP),
                     needs_of(ways[i], needs, c), fits, (double)(end - i) * steps);
    }
    if (fits && !context.plan_only) { return false; }
    Table table = without_rows;
    for (const PlannedWay& way : ways) {
        table.rows.push_back(std::vector<std::string>(table.columns.size()));
        table.rows.back()[0] = way.label;
        table.rows.back()[1] = strprintf("OOM (%.1f GiB per rank)", needs_of(way, needs, c).bytes / 1073741824.0);
    }
    if (c.rank == 0) { print(table, format); }
    return true;
}

// One file of all ranks, one process per rank, on one time axis.
static void write_traces_of_ranks(const Communicator& c, const std::string& path, const std::vector<Trace>& traces,
                                  const std::string& caption) {
    const std::string part = temporary_name(path);
    Unfinished mine(part);
    write_trace(part, traces, caption);
    std::vector<std::string> parts = gather_text(c, part);
    if (c.rank == 0) { merge_traces(path, parts); }
    gather_text(c, "");  // rank 0 has read all parts
}

// ---------------------------------------------------------------------------------------------------------------------
// --plot: the traced step of each way, two rows per rank.

static int part_of(const std::string& range) {
    static const std::map<std::string, int> parts = {
        {"forward", FORWARD_PART},         {"loss", FORWARD_PART},
        {"backward", BACKWARD_PART},       {"synchronize gradients", WAIT_PART},
        {"gradient norm", OPTIMIZER_PART}, {"optimizer", OPTIMIZER_PART}};
    auto found = parts.find(range);
    return found == parts.end() ? -1 : found->second;
}

// Where backward begins and ends, and the optimizer begins; infinities where they are not there.
struct Bounds {
    double begin = INFINITY, end = -INFINITY, optimizer = INFINITY;
};
static Bounds bounds_of(const std::vector<Slice>& slices) {
    Bounds b;
    for (const Slice& s : slices) {
        if (s.colour == BACKWARD_PART) { b.begin = std::min(b.begin, s.start), b.end = std::max(b.end, s.end); }
        if (s.colour == OPTIMIZER_PART) { b.optimizer = std::min(b.optimizer, s.start); }
    }
    return b;
}

std::vector<Slice> slices_of_step(const Trace& trace) {
    bool kernels = !trace.work.empty(), reduced = false;
    std::vector<int> parts;  // of the ranges
    std::vector<Slice> slices;
    auto on_gloos_thread = [&](const TracedRange& r) { return r.parent < 0 && !strcmp(r.name, "all-reduce"); };
    for (const TracedRange& r : trace.ranges) {  // parents stand before their children
        bool outer = r.parent >= 0 && trace.ranges[r.parent].parent < 0;
        parts.push_back(!strcmp(r.name, "all-reduce") ? ALL_REDUCE_PART
                        : outer                       ? part_of(r.name)
                        : r.parent < 0                ? -1
                                                      : parts[r.parent]);
        bool shown = on_gloos_thread(r) || (!kernels && outer && parts.back() != ALL_REDUCE_PART);
        if (shown && parts.back() >= 0) { slices.push_back({(double)r.start, (double)r.end, parts.back()}); }
    }
    for (const TracedWork& w : trace.work) {
        int part = strstr(w.name, "nccl") ? ALL_REDUCE_PART : w.range < 0 ? -1 : parts[w.range];
        bool copied_by_gloo = w.range >= 0 && on_gloos_thread(trace.ranges[w.range]);
        if (part < 0 || part == WAIT_PART || copied_by_gloo) { continue; }
        slices.push_back({(double)w.start, (double)w.end, part});
    }
    double start = INFINITY;  // the barrier before it is an all-reduce, too
    for (const Slice& s : slices) { start = s.colour == ALL_REDUCE_PART ? start : std::min(start, s.start); }
    slices.erase(std::remove_if(slices.begin(), slices.end(), [&](const Slice& s) { return s.start < start; }),
                 slices.end());
    for (const Slice& s : slices) { reduced = reduced || s.colour == ALL_REDUCE_PART; }
    Bounds b = bounds_of(slices);
    if (kernels && reduced && b.end < b.optimizer && b.optimizer < INFINITY) {
        slices.push_back({b.end, b.optimizer, WAIT_PART});
    }
    std::stable_sort(slices.begin(), slices.end(), [](const Slice& a, const Slice& b) { return a.start < b.start; });
    return slices;
}

StepSums sums_of(const std::vector<Slice>& slices) {
    Bounds b = bounds_of(slices);
    StepSums sums{};
    for (const Slice& s : slices) {
        sums.step = std::max(sums.step, s.end - slices[0].start);
        if (s.colour != ALL_REDUCE_PART) { continue; }
        sums.all_reduces += s.end - s.start;
        sums.hidden += std::max(0.0, std::min(s.end, b.end) - std::max(s.start, b.begin));
    }
    return sums;
}

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

static Timeline timeline_of(const Communicator& c, const Trace& trace, const Variant& v) {
    std::vector<std::vector<Slice>> ranks = slices_of_ranks(c, slices_of_step(trace));
    Timeline timeline;
    timeline.rows = rows_of_ranks(ranks, v.strategy != NO_SYNC);
    StepSums mean{};
    for (const std::vector<Slice>& of_rank : ranks) {
        StepSums sums = sums_of(of_rank);
        double n = (double)ranks.size();
        mean.step += sums.step / n, mean.all_reduces += sums.all_reduces / n, mean.hidden += sums.hidden / n;
    }
    timeline.title = label_of(v), timeline.remark = strprintf("step %.2f ms", mean.step);
    if (v.strategy != NO_SYNC) {
        timeline.title += strprintf(": %d all-reduce%s %s backward", v.calls, v.calls == 1 ? "" : "s",
                                    goes_at_once(v.strategy) ? "during" : "after");
        timeline.remark += strprintf(", all-reduces %.2f ms, hidden %.1f%%", mean.all_reduces,
                                     mean.all_reduces > 0 ? 100 * mean.hidden / mean.all_reduces : 0);
    }
    return timeline;
}

static void plot_steps(const Communicator& c, const std::string& path, const std::vector<Trace>& traces,
                       const std::vector<Variant>& variants, const std::string& caption) {
    std::string missing;
    for (const std::string& why : gather_text(c, context.device == CUDA ? traces[0].no_kernels : "")) {
        missing = missing.empty() ? why : missing;
    }
    if (!missing.empty()) {  // launches alone would not show when kernels ran
        if (c.rank == 0) { note("--plot %s: left out, tracing off: %s", path.c_str(), missing.c_str()); }
        return;
    }
    std::vector<Timeline> timelines;
    for (size_t i = 0; i < traces.size(); i++) { timelines.push_back(timeline_of(c, traces[i], variants[i])); }
    if (c.rank != 0) { return; }
    std::vector<Series> legend = {{"forward, loss", {}, false, FORWARD_PART},
                                  {"backward", {}, false, BACKWARD_PART},
                                  {"waits for all-reduces", {}, false, WAIT_PART},
                                  {"optimizer", {}, false, OPTIMIZER_PART},
                                  {"all-reduce", {}, false, ALL_REDUCE_PART}};
    save_file(path, draw("One step, each way: what computes and what communicates",
                         caption + "; drawn from a trace of one more step each, numbers are its means over ranks",
                         timelines, legend, "ms from the start of the step"));
}

// ---------------------------------------------------------------------------------------------------------------------
// The commands

static int benchmark(const Options& o, const char* command, std::vector<Variant> variants) {
    return run_ranks(o, [&](const Communicator& c) {
        Plan p = fitting_plan(o, c, true);
        if (!o.trace.empty()) { replace_file(temporary_name(o.trace), nullptr); }  // its name is longer than --trace's
        std::vector<PlannedWay> ways;
        for (const Variant& v : variants) { ways.push_back({label_of(v)}); }
        if (too_large(c, p, comparison_table(caption_of(p, c, command), {}, p, c), ways, o.format, true)) {
            if (!o.plot.empty() && c.rank == 0) { note("--plot %s: left out: no step ran", o.plot.c_str()); }
            return;
        }
        Model model = random_model(p.configs[0], o.seed);
        make_gradients(model, reduced_as(p.o));
        make_optimizer_state(model);
        Batch batch = random_batch(p.o.batch_size, p.o.context_length, p.configs[0].vocab_size, o.seed + 1 + c.rank);
        std::vector<Trace> traces;
        bool traced = !o.trace.empty() || !o.plot.empty();
        for (Variant& v : variants) { measure(c, p, model, batch, v, traced ? &traces : nullptr); }
        if (!o.trace.empty()) { write_traces_of_ranks(c, o.trace, traces, caption_of(p, c, command)); }
        if (!o.plot.empty()) { plot_steps(c, o.plot, traces, variants, caption_of(p, c, command)); }
        const bool alone = true;
        Stats single{};
        if (alone) { single = single_process(c, p, model, o.seed); }
        bool bucketed = variants.back().strategy == BUCKETED;
        Table overhead;
        if (bucketed) { overhead = bucket_model(c, variants, variants.back().bytes, o.quick); }
        if (c.rank != 0) { return; }

        print(comparison_table(caption_of(p, c, command), variants, p, c), o.format);
        if (bucketed) { print(overhead, o.format); }
        const Variant& last =
            *std::min_element(variants.begin(), variants.end(), [&](const Variant& a, const Variant& b) {
                auto key = [&](const Variant& v) {  // the fastest of the buckets
                    return v.strategy == variants.back().strategy ? mean_of(v, &StepTimes::total) : INFINITY;
                };
                return key(a) < key(b);
            });
        double total = mean_of(last, &StepTimes::total);
        Table one{"one process with the whole batch, all cores or one GPU",
                  {"Setup", "Total Time (ms)", "Samples/second", "Tokens/second", "Speedup ratio"},
                  {}};
        auto row = [&](const std::string& what, double ms) {
            double samples = 1e3 * p.o.batch_size * c.world / ms;
            auto cell = [](const char* format, double x) { return std::isnan(x) ? "" : strprintf(format, x); };
            one.rows.push_back({what, std::isnan(ms) ? "OOM" : strprintf("%.2f", ms), cell("%.2f", samples),
                                cell("%.0f", samples * p.o.context_length), cell("%.2fx", single.mean / ms)});
        };
        row("single", single.mean);
        row(strprintf("%d ranks, %s", c.world, label_of(last).c_str()), total);
        if (alone) { print(one, o.format); }
        if (o.format != "md") { return; }
        int64_t parameters = 0;
        for (const Parameter& p : model.parameters) { parameters += count(p.shape); }
        printf("```");  // text, in markdown
        for (const Variant& v : variants) {
            if (v.strategy != NO_SYNC && v.strategy != BUCKETED) { print_step_lines(v); }
        }
        print_blocks(last, p, c, parameters);
        if (variants.size() > 2) { print_comparison(variants[1], last); }
        printf("```\n");
    });
}
int cmd_naive_ddp_benchmarking(const Options& o) {
    return benchmark(o, "naive_ddp_benchmarking", {{NO_SYNC, 0}, {NAIVE, 0}});
}
int cmd_minimal_ddp_flat_benchmarking(const Options& o) {
    return benchmark(o, "minimal_ddp_flat_benchmarking", {{NO_SYNC, 0}, {NAIVE, 0}, {FLAT, 0}});
}
int cmd_ddp_overlap_individual_parameters_benchmarking(const Options& o) {
    return benchmark(o, "ddp_overlap_individual_parameters_benchmarking",
                     {{NO_SYNC, 0}, {NAIVE, 0}, {FLAT, 0}, {OVERLAPPED, 0}});
}
int cmd_ddp_bucketed_benchmarking(const Options& o) {
    std::vector<Variant> variants = {{NO_SYNC, 0}, {NAIVE, 0}, {FLAT, 0}, {OVERLAPPED, 0}};
    for (double mb : o.bucket_size_mb) { variants.push_back({BUCKETED, mb}); }
    return benchmark(o, "ddp_bucketed_benchmarking", variants);
}

// ---------------------------------------------------------------------------------------------------------------------
// optimizer_state_sharding: 10 steps with the public test's settings (lr 0.1, decay 0.1), sharded against unsharded,
// both data parallel. The second parameter group comes after 5 steps.

static bool shard_and_compare(const Communicator& c, Sharding sharding, bool sgd, bool tied, const Options& o,
                              Table* table) {
    Trainee ours = make_toy(tied, o, o.seed), reference = make_toy(tied, o, o.seed);
    auto d = data_parallel(c, sharding == ZERO1 ? NO_SYNC : FLAT, 0, ours.weights, ours.gradients, ours.parameters,
                           ours.slots);
    auto plain =
        data_parallel(c, FLAT, 0, reference.weights, reference.gradients, reference.parameters, reference.slots);
    Optimizer sharded{c, sharding, {}}, whole{c, UNSHARDED, {}};
    int64_t first = ours.parameters.back().offset, all = ours.gradients.size();
    auto group = [&](const Trainee& t, int64_t begin, int64_t end, float lr) {
        ParameterGroup g{view(t.weights, begin, {end - begin}), view(t.gradients, begin, {end - begin})};
        g.sgd = sgd, g.adamw.lr = sgd ? lr / 10 : lr, g.adamw.weight_decay = 0.1f;
        return g;
    };
    Difference difference;
    int64_t rows = (int64_t)ROWS_A_RANK * c.world;
    for (int step = 0; step < 10; step++) {
        if (step == 0) {
            add_parameter_group(sharded, group(ours, 0, first, 0.1f)),
                add_parameter_group(whole, group(reference, 0, first, 0.1f));
        } else if (step == 5) {
            add_parameter_group(sharded, group(ours, first, all, 0.05f));
            add_parameter_group(whole, group(reference, first, all, 0.05f));
        }
        begin_step(*d), begin_step(*plain);
        loss_and_gradients(ours, o.seed, step, (int64_t)c.rank * ROWS_A_RANK, ROWS_A_RANK, rows);
        finish_gradient_synchronization(*d);
        loss_and_gradients(reference, o.seed, step, (int64_t)c.rank * ROWS_A_RANK, ROWS_A_RANK, rows);
        finish_gradient_synchronization(*plain);
        optimizer_step(sharded), optimizer_step(whole);
        add_difference(difference, ours.weights, reference.weights);
    }
    auto state_of = [](const Optimizer& optimizer) {
        int64_t n = 0;
        for (const ParameterGroup& g : optimizer.groups) { n += (g.m ? g.m.size() : 0) + (g.v ? g.v.size() : 0); }
        return n;
    };
    bool same = same_bits_everywhere(c, ours.weights), match = same && difference.wrong == 0;
    std::string states;
    for (const std::string& n : gather_text(c, std::to_string(state_of(sharded)))) {
        states += (states.empty() ? "" : " + ") + n;
    }
    table->rows.push_back({ours.name, sgd ? "SGD, momentum" : "AdamW", name_of(sharding),
                           strprintf("%.2e", difference.max), strprintf("%.2e", difference.sum / difference.n),
                           difference.wrong ? "DIFFER" : "match", same ? "identical" : "DIFFER", states,
                           std::to_string(state_of(whole))});
    std::string verdicts;
    for (const std::string& v : gather_text(c, match ? "" : "x")) { verdicts += v; }
    return verdicts.empty();
}

int cmd_optimizer_state_sharding(const Options& o) {
    return run_ranks(o, [&](const Communicator& c) {
        Table table{
            strprintf("optimizer_state_sharding: weights after each of 10 steps, sharded against unsharded; %d ranks, "
                      "toy models with %d outputs, backend %s, lr 0.1 (SGD 0.01), weight decay 0.1, a second parameter "
                      "group with half the lr "
                      "after 5 steps; %s; commit %s",
                      c.world, toy_outputs(o), c.backend.c_str(), device_description().c_str(), commit().c_str()),
            {"Model", "Optimizer", "Scheme", "max diff", "mean diff", "Parameters", "bits on all ranks",
             "state elements, by rank", "unsharded"},
            {}};
        bool ok = true;
        for (bool tied : {false, true}) {
            for (bool sgd : {false, true}) {
                for (Sharding s : {BROADCAST, ZERO1}) { ok = shard_and_compare(c, s, sgd, tied, o, &table) && ok; }
            }
        }
        if (c.rank == 0) { print(table, o.format); }
        if (!ok) { fail("sharded training does not give the weights of unsharded training"); }
    });
}

// optimizer_state_sharding_accounting: peak memory of three stretches of a first step, and the time of later ones.
int cmd_optimizer_state_sharding_accounting(const Options& o) {
    if (o.precision[0] == "fp16") {
        usage_error("--precision: got fp16, which needs loss scaling; takes fp32, tf32 or bf16 here");
    }
    return run_ranks(o, [&](const Communicator& c) {
        Plan p = fitting_plan(o, c, false);
        std::string caption = caption_of(p, c, "optimizer_state_sharding_accounting");
        Table memory{caption +
                         "; peak of rank 0 in MiB; predicted: 4 bytes per parameter for weights, gradients and each of "
                         "two moments, the moments divided by the ranks where sharded",
                     {"Optimizer", "Moment", "parameters", "gradients", "optimizer state", "activations and the rest",
                      "peak", "predicted without activations"},
                     {}};
        double moments = 0;
        for (const Parameter& w : lay_out_model(p.configs[0]).parameters) { moments += 8.0 * count(w.shape); }
        std::vector<PlannedWay> ways = {{name_of(UNSHARDED)}, {name_of(BROADCAST), moments}, {name_of(ZERO1), moments}};
        if (too_large(c, p, memory, ways, o.format, false)) { return; }
        Table time{
            "time per iteration; gradients: from backward's end to the optimizer's start; optimizer and weights: its "
            "step and the wait for the new weights' broadcast (ZeRO-1: for the gradients' reduce-scatter and the "
            "weights' all-gather); bytes that each rank sends in a ring",
            {"Optimizer", "Total Time (ms)", "std", "gradients (ms)", "optimizer and weights (ms)", "MB sent per step",
             "formula"},
            {}};
        Batch batch = random_batch(p.o.batch_size, p.o.context_length, p.configs[0].vocab_size, o.seed + 1 + c.rank);
        for (Sharding sharding : {UNSHARDED, BROADCAST, ZERO1}) {
            reset_peak(context.device);
            Model model = make_model(p.configs[0]);
            init_weights(model, o.seed);
            synchronize();
            double psi = (double)model.weights.size() * 4, n = c.world;
            auto moment = [&](const char* what, double predicted) {
                const MemoryUse& use = memory_use(context.device);
                double rest =
                    (double)use.peak - use.peak_by[PARAMETERS] - use.peak_by[GRADIENTS] - use.peak_by[OPTIMIZER];
                auto mib = [](double bytes) { return strprintf("%.1f", bytes / 1048576); };
                memory.rows.push_back({name_of(sharding), what, mib(use.peak_by[PARAMETERS]),
                                       mib(use.peak_by[GRADIENTS]), mib(use.peak_by[OPTIMIZER]), mib(rest),
                                       mib(use.peak), mib(predicted)});
                reset_peak(context.device);
            };
            moment("after init", psi);
            make_gradients(model);
            auto d = data_parallel(c, sharding == ZERO1 ? NO_SYNC : FLAT, 0, model.weights, model.gradients,
                                   model.parameters, model.slots);
            Optimizer optimizer{c, sharding, {}};
            add_parameter_group(optimizer, {model.weights, model.gradients});
            begin_step(*d);
            forward_backward(model, batch, 1);
            finish_gradient_synchronization(*d);
            synchronize();
            moment("before step", 2 * psi);
            optimizer_step(optimizer);
            synchronize();
            double state = 2 * psi / (sharding == UNSHARDED ? 1 : n);
            moment("after step", 2 * psi + state);
            Variant v{NO_SYNC, 0};
            for (int i = 0; i < p.o.warmup[0] + p.o.steps; i++) {
                StepTimes t = timed_step(model, *d, batch, 1, [&] { optimizer_step(optimizer); });
                if (c.rank == 0) { progress("%s: %d of %d", name_of(sharding), i + 1, p.o.warmup[0] + p.o.steps); }
                if (i >= p.o.warmup[0]) { v.steps.push_back(t); }
            }
            moment("later steps", 2 * psi + state);
            v.steps = mean_over_ranks(c, v.steps);
            Stats total = stats_of(v, &StepTimes::total);
            double sent = (sharding == BROADCAST ? 3 : 2) * psi * (n - 1) / n;
            time.rows.push_back({name_of(sharding), strprintf("%.2f", total.mean), strprintf("%.2f", total.std),
                                 strprintf("%.2f", mean_of(v, &StepTimes::exposed)),
                                 strprintf("%.2f", mean_of(v, &StepTimes::optimizer)), strprintf("%.1f", sent / 1e6),
                                 sharding == BROADCAST ? "3 Psi (N-1)/N" : "2 Psi (N-1)/N"});
        }
        if (c.rank != 0) { return; }
        print(memory, o.format);
        print(time, o.format);
    });
}
