#include "sink/kit.hpp"
#include "sinks/nats/nats_sink.hpp"

RETRYSAFE_SINK(retrysafe::nats::NatsSink, "nats", 0)
