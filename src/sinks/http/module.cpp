#include "sinks/http/http_sink.hpp"

RETRYSAFE_SINK(retrysafe::http::HttpSink, "http", 0)
