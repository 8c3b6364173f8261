#include "sink/kit.hpp"
#include "sinks/postgres/postgres_sink.hpp"

RETRYSAFE_SINK(retrysafe::sink::PostgresSink, "postgres", RETRYSAFE_SINK_KEEPS_ORDER)
