// fast/graphs.cu: a step's two passes as CUDA graphs, or a forward alone as one.
//
// A launch costs the CPU some 2 us and what leads to it more; a small model's kernels take less
// than that each. A graph launches all its kernels at once and leaves shorter gaps between them.
// The first step of a kind is a rehearsal (see StepPlaces), the second is captured, and from then
// on the same kernels run on the same buffers. Read forward_backward_by_graphs first, then
// graphs_or, which says whether a step is a rehearsal; its callers capture or launch.
#include "fast_ways.h"
#include "lib/gpu.h"

// A captured step's buffers lie in one block. A rehearsal, the same step with buffers from the
// pool, shows which buffer is held from when to when; plan() then lays them into a block that is
// not much larger than what the step holds at most.
struct StepPlaces : Places {
    struct Place {
        size_t bytes, offset;
        int from, to;  // when it is taken and given back, on a clock that counts both
    };
    shared_ptr<Memory> block;  // null in the rehearsal
    vector<Place> places;      // in the order of allocation
    int events = 0;            // the clock
    size_t next = 0;           // with a block: the place to be taken next

    // Takes the next place. Returns its number, and with a block sets *at to its address.
    size_t take(size_t bytes, void** at) override {
        constexpr size_t UNIT = 512;  // bytes: buffers begin at multiples, aligned for all readers
        bytes = (bytes + UNIT - 1) / UNIT * UNIT;
        if (!block) {
            places.push_back({bytes, 0, events++, INT_MAX});
            return places.size() - 1;
        }

        if (next == places.size() || places[next].bytes != bytes) {
            fail("a step allocates otherwise than its rehearsal: %zu bytes as number %zu", bytes,
                 next);
        }
        *at = (char*)block->data + places[next].offset;
        return next++;
    }
    void give(size_t number) override {
        if (!block) { places[number].to = events++; }
    }

    // Sets the offsets, right after the rehearsal, and returns the block's bytes. It places first
    // what stays, as gradients do, then the largest; each at the lowest offset where nothing lies
    // that is there at the same time. At the handout's sizes the block is 0 to 4 % larger than what
    // is held at most.
    size_t plan() {
        vector<Place*> order, placed;
        for (Place& p : places) { order.push_back(&p); }
        std::stable_sort(order.begin(), order.end(), [](const Place* a, const Place* b) {
            bool a_stays = a->to == INT_MAX, b_stays = b->to == INT_MAX;
            if (a_stays != b_stays) { return a_stays; }
            return !a_stays && a->bytes > b->bytes;
        });

        size_t end = 0;
        for (Place* p : order) {
            p->offset = 0;
            for (const Place* other : placed) {  // by offset
                if (other->to < p->from || p->to < other->from) { continue; }
                if (other->offset >= p->offset + p->bytes) { break; }
                p->offset = max(p->offset, other->offset + other->bytes);
            }
            auto lies_before = [](auto* a, auto* b) { return a->offset < b->offset; };
            placed.insert(std::upper_bound(placed.begin(), placed.end(), p, lies_before), p);
            end = max(end, p->offset + p->bytes);
        }
        return end;
    }
};

// Counts this process's launches, for tests: two for each step by graphs, one for a forward alone.
int graph_launches = 0;

#ifdef HAVE_CUDA
// A step of one kind: its rehearsal at first, and its graphs once it was captured.
struct StepGraphs {
    shared_ptr<StepPlaces> places = make_shared<StepPlaces>();
    size_t bytes = 0;  // that their block has to have
    bool too_large = false;
    string kind;  // of step: what its kernels have built in
    Batch batch;
    Tensor loss, logits;  // logits: of a forward alone
    // The gradients that the captured backward fills, each with its tensor in the block.
    vector<pair<GradientPtr, Tensor>> gradients;
    cudaGraphExec_t forward = nullptr, backward = nullptr;
    ~StepGraphs() {  // errors have been reported by then, or the process ends
        if (forward) { cudaGraphExecDestroy(forward); }
        if (backward) { cudaGraphExecDestroy(backward); }
    }
};

// Returns as text all that a captured step has built in. A step of another kind needs new graphs.
// The two addresses: before forward lm_head has a 16-bit copy where the weights are split (see
// ready_weights in fast/adamw.cu), so this one tells their form; and a longer RoPE table, which
// make_ready makes, lies elsewhere.
static string kind_of_step(const Model& model, const char* what, const Tensor& tokens,
                           float loss_scale) {
    return strprintf("%s %s %d %d %s %d %a %p %p", what, to_string(tokens.shape).c_str(),
                     context.precision, context.recompute, name_of(context.checkpoint).c_str(),
                     context.head_chunk, loss_scale, model.lm_head.gradient->low_precision.data,
                     model.rope.data);
}
// Returns the kernels of `work` as a graph; they are not run. Its buffers are those of the model's
// places. Where that fails the model forgets its graphs: some places are taken by then, so that the
// next step has to be a rehearsal.
static cudaGraphExec_t capture(Model& model, const Job& work) {
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t executable;
    try {
        CUDA_CHECK(cudaStreamBeginCapture(stream(), cudaStreamCaptureModeThreadLocal));
        allocate_in(((StepGraphs*)model.fast.get())->places, work);
        CUDA_CHECK(cudaStreamEndCapture(stream(), &graph));
        CUDA_CHECK(cudaGraphInstantiate(&executable, graph, 0));
    } catch (...) {
        cudaStreamEndCapture(stream(), &graph);
        if (graph) { cudaGraphDestroy(graph); }
        cudaGetLastError();               // or the next launch would report it
        drop_weight_copies(model.slots);  // which no kernel has made
        model.fast = nullptr;
        throw;
    }
    CUDA_CHECK(cudaGraphDestroy(graph));
    return executable;
}

static void launch_graph(cudaGraphExec_t graph, const char* name) {
    Range range(name);
    CUDA_CHECK(cudaGraphLaunch(graph, stream()));
    graph_launches++;
}
static void copy_in_stream(const Tensor& to, const Tensor& from) {
    CUDA_CHECK(cudaMemcpyAsync(to.data, from.data, to.bytes(), cudaMemcpyDefault, stream()));
}

// Returns the graphs of this kind of step, to be captured or launched. Null: `by_launches` has done
// the step, as the rehearsal or because there is no room for the graphs' block. A model keeps one
// kind only: where two kinds take turns, each step is a rehearsal again.
static StepGraphs* graphs_or(Model& model, const string& kind, const Shape& tokens,
                             const Job& by_launches) {
    auto* g = (StepGraphs*)model.fast.get();
    if (!g || g->kind != kind) {
        start_cublas();  // whose workspace is no part of the step
        auto rehearsal = make_shared<StepGraphs>();
        // The old kind's block goes before the new step needs the room, unless gradients still lie
        // in it.
        model.fast = nullptr;
        allocate_in(rehearsal->places, by_launches);
        rehearsal->bytes = rehearsal->places->plan();
        rehearsal->kind = kind;
        model.fast = rehearsal;
        return nullptr;
    }

    if (!g->forward && !g->too_large) {
        give_back_cached_memory();  // the rehearsal's buffers
        g->too_large = g->bytes > available_memory(CUDA);
    }
    if (g->too_large) {
        by_launches();
        return nullptr;
    }
    if (!g->forward) {
        g->places->block = allocate(CUDA, g->bytes, ACTIVATIONS);
        g->batch = {empty(tokens, I32, INPUTS), empty(tokens, I32, INPUTS)};
    }
    return g;
}

// Does by graphs what forward_backward(), its caller, does without: both passes. Returns the loss.
// `between` must allocate nothing on the GPU: the rehearsal would count it, and the capture, which
// does not call `between`, would then differ from its rehearsal.
static Tensor forward_backward_by_graphs(Model& model, const Batch& batch, float loss_scale,
                                         const Job& between) {
    zero_gradients(model);
    make_ready(model, batch.tokens.dim(1));
    Tensor result = empty({}, F32);
    string kind = kind_of_step(model, "step", batch.tokens, loss_scale);
    StepGraphs* g = graphs_or(model, kind, batch.tokens.shape, [&] {
        Tensor loss = forward_to_loss(model, batch);
        copy_in_stream(result, loss);
        between();
        backward_from_loss(model, loss, loss_scale);
    });
    if (!g) { return result; }

    if (!g->forward) {
        g->loss = empty({}, F32);
        Tensor loss;
        g->forward = capture(model, [&] {
            loss = forward_to_loss(model, g->batch);
            copy_in_stream(g->loss, loss);
        });
        g->backward = capture(model, [&] { backward_from_loss(model, loss, loss_scale); });
        for (const Tensor& t : model.slots) {
            if (t.gradient->filled) { g->gradients.push_back({t.gradient, t.gradient->value}); }
        }
    }

    copy_in_stream(g->batch.tokens, batch.tokens);
    copy_in_stream(g->batch.targets, batch.targets);
    launch_graph(g->forward, "forward");
    between();
    launch_graph(g->backward, "backward");

    // A graph runs no host code, so what backward does there is done here. In all steps but the
    // captured one the gradients have no tensors by now: zero_gradients has taken them away.
    drop_weight_copies(model.slots);
    for (const auto& [gradient, value] : g->gradients) {
        gradient->value = value;
        gradient->filled = true;
    }
    copy_in_stream(result, g->loss);
    return result;
}
// Returns the logits of a forward without a tape, in a buffer that the next call overwrites.
static Tensor infer_by_graph(Model& model, const Tensor& tokens) {
    make_ready(model, tokens.dim(1));
    Tensor logits;
    StepGraphs* g = graphs_or(model, kind_of_step(model, "forward", tokens, 1), tokens.shape,
                              [&] { logits = forward(model, tokens); });
    if (!g) { return logits; }

    if (!g->forward) {
        g->forward = capture(model, [&] { g->logits = forward(model, g->batch.tokens); });
    }
    copy_in_stream(g->batch.tokens, tokens);
    launch_graph(g->forward, "forward");
    return g->logits;
}
// Tells whether steps in this context go by graphs. With a gradients' arena they do not, since
// somebody may wait for single gradients; and whoever watches wants to see single kernels. So in
// ddp.cu's benchmarks the one process goes by graphs, and the ranks do not.
static bool by_graphs(const Model& model) {
    return context.mode == FLASH && context.device == CUDA && !context.each_launch &&
           !model.gradients;
}
static const EnterWays entered([] {
    fast_ways.graphs_take = by_graphs;
    fast_ways.forward_backward = forward_backward_by_graphs;
    fast_ways.infer = infer_by_graph;
});
#endif
