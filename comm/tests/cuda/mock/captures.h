// Captures and graphs. To be included where libcuda.cpp has its functions.
#pragma once

int cuThreadExchangeStreamCaptureMode(int* mode) {
  thread_local int present = 0;
  std::swap(present, *mode);
  return SUCCESS;
}
int cuStreamBeginCapture_v2(Stream* stream, int) {
  static std::atomic<u64> last{0};
  if (stream == nullptr || stream->capture) return CAPTURE_UNSUPPORTED;
  stream->capture = std::make_shared<Capture>(++last, stream, new Graph);
  stream->last_node = nullptr;
  return SUCCESS;
}
// Streams that joined are told by the event that joins them back; here they just see that it is over.
int cuStreamEndCapture(Stream* stream, Graph** graph) {
  *graph = nullptr;
  if (!stream->capture || stream->capture->origin != stream) return CAPTURE_UNMATCHED;
  *graph = stream->capture->graph;
  stream->capture->over = true;
  stream->capture = nullptr;
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
  *object = new UserObject{function, data};
  return SUCCESS;
}
int cuUserObjectRelease(UserObject* object, unsigned) {
  object->function(object->data);
  delete object;
  return SUCCESS;
}
int cuGraphRetainUserObject(Graph* graph, UserObject* object, unsigned, unsigned) {
  graph->objects->all.emplace_back(object->function, object->data);
  delete object;
  return SUCCESS;
}
int cuGraphInstantiateWithFlags(std::shared_ptr<Exec>** exec, Graph* graph, u64) {
  *exec = new std::shared_ptr<Exec>(std::make_shared<Exec>(Exec{graph->nodes, graph->objects}));
  return SUCCESS;
}
int cuGraphLaunch(std::shared_ptr<Exec>* exec, void* stream) {
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
  delete exec;
  return SUCCESS;
}
int cuGraphDestroy(Graph* graph) {
  delete graph;
  return SUCCESS;
}
