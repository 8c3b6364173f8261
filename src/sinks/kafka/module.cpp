#include "sinks/kafka/kafka_sink.hpp"

// Not RETRYSAFE_SINK_KEEPS_ORDER: README.md tells why.
RETRYSAFE_SINK(retrysafe::kafka::KafkaSink, "kafka", 0)
