/* What the collector takes for a communication library: the probe functions, and nothing that they do. */
#define PROBE(name, number) \
  __attribute__((noinline)) int name(const void *record) { __asm__ volatile("" : : "r"(record) : "memory"); return number; }
PROBE(ringsight_probe_launch, 1)
PROBE(ringsight_probe_proxy, 2)
PROBE(ringsight_probe_event, 3)
PROBE(ringsight_probe_lifecycle, 4)
