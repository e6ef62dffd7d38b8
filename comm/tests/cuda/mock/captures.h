// Captures and graphs. To be included where libcuda.cpp has its functions.
#pragma once

int cuThreadExchangeStreamCaptureMode(int* mode) {
  std::swap(capture_mode, *mode);
  return SUCCESS;
}
int cuStreamBeginCapture_v2(Stream* stream, int mode) {
  static std::atomic<u64> last{0};
  if (stream == nullptr || stream->capture) return CAPTURE_UNSUPPORTED;
  stream->capture = std::make_shared<Capture>(++last, stream, new Graph, mode == 0);
  if (mode == 0) global_captures++;
  stream->last_node = nullptr;
  return SUCCESS;
}
// Streams that joined are told by the event that joins them back; here they just see that it is over.
int cuStreamEndCapture(Stream* stream, Graph** graph) {
  *graph = nullptr;
  if (!stream->capture || stream->capture->origin != stream) return CAPTURE_UNMATCHED;
  *graph = stream->capture->graph;
  stream->capture->over = true;
  const bool was_global = stream->capture->is_global;
  stream->capture = nullptr;
  if (!was_global) return SUCCESS;
  global_captures--;
  return disturbed > 0 ? CAPTURE_INVALIDATED : SUCCESS;
}
int cuStreamIsCapturing(Stream* stream, int* status) {
  *status = !stream->capture ? 0 : stream->capture->is_global && disturbed > 0 ? 2 : 1;
  return SUCCESS;
}
int cuStreamGetCaptureInfo_v2(void* stream, int* status, u64* id, Graph** graph, void*** dependencies, size_t* count) {
  calls[CAPTURE]++;
  if (current == nullptr && stream == nullptr) return INVALID_CONTEXT;
  auto& capture = of(stream)->capture;
  *status = capture ? 1 : 0;
  if (capture) {
    *id = capture->id;
    *graph = capture->graph;
    // Nodes run in order: to depend on the stream's last one is enough.
    *dependencies = &of(stream)->last_node;
    *count = of(stream)->last_node == nullptr ? 0 : 1;
  }
  return SUCCESS;
}
int cuStreamUpdateCaptureDependencies(void* stream, void** nodes, size_t count, unsigned) {
  if (!of(stream)->capture) return CAPTURE_UNMATCHED;
  // Nodes run in order: to depend on several is to depend on the last one.
  Graph* graph = of(stream)->capture->graph;
  of(stream)->last_node = count == 0 ? nullptr : nodes[0];
  for (size_t i = 1; i < count; i++) {
    if (graph->find(nodes[i]) == graph->nodes.end()) return INVALID_VALUE;
    if (graph->find(nodes[i]) > graph->find(of(stream)->last_node)) of(stream)->last_node = nodes[i];
  }
  return SUCCESS;
}
int cuGraphAddEventRecordNode(void** node, Graph* graph, void**, size_t, Mark* event) {
  *node = graph->add(nullptr, nullptr, event->recorded);
  return SUCCESS;
}
// What a node does not wait for any more may be any that comes before it.
int cuGraphRemoveDependencies(Graph* graph, void** from, void** to, size_t count) {
  for (size_t i = 0; i < count; i++) {
    if (graph->find(from[i]) >= graph->find(to[i])) return INVALID_VALUE;
  }
  return SUCCESS;
}
// A node that is to wait for others comes last: only such that nothing waits for are moved.
int cuGraphAddDependencies(Graph* graph, void** from, void** to, size_t count) {
  for (size_t i = 0; i < count; i++) {
    auto moved = graph->find(to[i]);
    if (moved == graph->nodes.end() || graph->find(from[i]) == graph->nodes.end()) return INVALID_VALUE;
    std::rotate(moved, moved + 1, graph->nodes.end());
  }
  return SUCCESS;
}
int cuUserObjectCreate(UserObject** object, void* data, void (*function)(void*), unsigned, unsigned) {
  if (lacks("cuUserObjectCreate")) return OUT_OF_MEMORY;
  *object = new UserObject{function, data};
  return SUCCESS;
}
int cuUserObjectRelease(UserObject* object, unsigned) {
  object->function(object->data);
  delete object;
  return SUCCESS;
}
int cuGraphRetainUserObject(Graph* graph, UserObject* object, unsigned, unsigned) {
  if (lacks("cuGraphRetainUserObject")) return OUT_OF_MEMORY;
  graph->objects->all.emplace_back(object->function, object->data);
  delete object;
  return SUCCESS;
}
int cuGraphInstantiateWithFlags(std::shared_ptr<Exec>** exec, Graph* graph, u64) {
  if (!may_wait()) return CAPTURE_UNSUPPORTED;
  if (lacks("cuGraphInstantiateWithFlags")) return OUT_OF_MEMORY;
  wait_for_kernels();
  auto made = std::make_shared<Exec>();
  made->nodes = graph->nodes, made->objects = graph->objects, made->kernel = graph->kernel;
  *exec = new std::shared_ptr<Exec>(std::move(made));
  return SUCCESS;
}
int cuGraphCreate(Graph** graph, unsigned) {
  if (lacks("cuGraphCreate")) return OUT_OF_MEMORY;
  return *graph = new Graph, SUCCESS;
}
// From the first 16 bytes in which a kernel's new arguments differ from those that it had, to the last.
u64 changed_pieces(const std::vector<char>& before, const char* now, size_t bytes) {
  constexpr size_t PIECE = 16;
  if (before.size() != bytes) return (bytes + PIECE - 1) / PIECE;
  size_t first = 0, end = bytes;
  while (first < end && before[first] == now[first]) first++;
  while (end > first && before[end - 1] == now[end - 1]) end--;
  return first == end ? 0 : (end - 1) / PIECE - first / PIECE + 1;
}
// What a node is told; its arguments are copied.
int set_kernel(std::optional<KernelNode>& node, const KernelNodeParams* params) {
  void* function = params->function;
  if (current == nullptr) return INVALID_CONTEXT;
  const bool is_nothing = function == &nothing_kernel;
  if (params->extra != nullptr || (!is_channels(function) && !is_peer_kernel(function) && !is_nothing)) return INVALID_VALUE;
  const size_t bytes = is_nothing               ? 0
                       : is_channels(function) ? sizeof(Arguments)
                                               : ringsight_peer_kernels[static_cast<char*>(function) - peer_kernels].argument_bytes;
  if (!node) node.emplace();
  node->function = function;
  node->blocks = params->blocks[0], node->threads = params->threads[0], node->shared_bytes = params->shared_bytes;
  const auto* arguments = bytes == 0 ? nullptr : static_cast<const char*>(params->parameters[0]);
  calls[CHANGED] += changed_pieces(node->arguments, arguments, bytes);
  // In its memory: whose calls these are counts allocations.
  node->arguments.assign(arguments, arguments + bytes);
  return SUCCESS;
}
// Only that of a graph with no other node.
int cuGraphAddKernelNode_v2(void** node, Graph* graph, void**, size_t dependencies, const KernelNodeParams* params) {
  if (std::getenv("RINGSIGHT_MOCK_NO_KERNEL_NODES") != nullptr || lacks("cuGraphAddKernelNode_v2")) return OUT_OF_MEMORY;
  if (dependencies != 0 || !graph->nodes.empty() || graph->kernel) return INVALID_VALUE;
  *node = graph;
  return set_kernel(graph->kernel, params);
}
int cuGraphExecKernelNodeSetParams_v2(std::shared_ptr<Exec>* exec, void*, const KernelNodeParams* params) {
  return (*exec)->kernel ? set_kernel((*exec)->kernel, params) : INVALID_VALUE;
}
int cuGraphUpload(std::shared_ptr<Exec>*, void*) {
  if (current == nullptr) return INVALID_CONTEXT;
  wait_for_kernels();
  return SUCCESS;
}
int launch_kernel_node(Exec& exec, void* stream) {
  if (of(stream)->capture) return CAPTURE_UNSUPPORTED;
  calls[BY_GRAPH]++;
  const KernelNode& kernel = *exec.kernel;
  void* parameters[] = {const_cast<char*>(kernel.arguments.data())};
  const auto launch = [&] {
    return cuLaunchKernel(kernel.function, kernel.blocks, 1, 1, kernel.threads, 1, 1, kernel.shared_bytes, stream, parameters, nullptr);
  };
  if (skips) return launch();
  if (auto before = exec.launched.last()) add(stream, [before] { before->wait(); });
  const int result = launch();
  auto moment = exec.launched.next();
  return add(stream, [moment] { moment->reach(); }), result;
}
int cuGraphLaunch(std::shared_ptr<Exec>* exec, void* stream) {
  if ((*exec)->kernel) return launch_kernel_node(**exec, stream);
  // What is waited for outside is decided now.
  auto works = std::make_shared<std::vector<Task>>();
  for (auto& node : (*exec)->nodes) {
    if (node.work) {
      works->push_back(node.work);
    } else if (node.recorded) {
      works->push_back([moment = node.recorded->next()] { moment->reach(); });
    } else if (auto moment = node.waited->last()) {
      works->push_back([moment] { moment->wait(); });
    }
  }
  return add(stream, [works, exec = *exec] {
    for (auto& work : *works) work();
  });
}
int cuGraphExecDestroy(std::shared_ptr<Exec>* exec) {
  if (!may_wait()) return CAPTURE_UNSUPPORTED;
  delete exec;
  return SUCCESS;
}
int cuGraphDestroy(Graph* graph) { return delete graph, SUCCESS; }
