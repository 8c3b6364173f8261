"""What the tests need of librdkafka beyond what kcat offers: making topics, and its mock cluster, through ctypes."""
import ctypes
from ctypes import POINTER, c_char_p, c_int, c_int16, c_int32, c_size_t, c_void_p, byref, create_string_buffer

_library = ctypes.CDLL("librdkafka.so.1")

TRANSPORT = -195
TOPIC_ALREADY_EXISTS = 36
INVALID_REPLICATION_FACTOR = 38
TOPIC_RESOURCE = 2
PRODUCE, INIT_PRODUCER_ID = 0, 22  # keys of requests


def _function(name, result, *arguments):
    function = getattr(_library, "rd_kafka_" + name)
    function.restype, function.argtypes = result, arguments
    return function


_version = _function("version", c_int)
_conf_new = _function("conf_new", c_void_p)
_conf_set = _function("conf_set", c_int, c_void_p, c_char_p, c_char_p, c_char_p, c_size_t)
_new = _function("new", c_void_p, c_int, c_void_p, c_char_p, c_size_t)
_destroy = _function("destroy", None, c_void_p)
_err2str = _function("err2str", c_char_p, c_int)
_queue_new = _function("queue_new", c_void_p, c_void_p)
_queue_poll = _function("queue_poll", c_void_p, c_void_p, c_int)
_queue_destroy = _function("queue_destroy", None, c_void_p)
_event_error = _function("event_error", c_int, c_void_p)
_event_destroy = _function("event_destroy", None, c_void_p)
_topic_new = _function("NewTopic_new", c_void_p, c_char_p, c_int, c_int, c_char_p, c_size_t)
_topic_set = _function("NewTopic_set_config", c_int, c_void_p, c_char_p, c_char_p)
_topic_destroy = _function("NewTopic_destroy", None, c_void_p)
_create_topics = _function("CreateTopics", None, c_void_p, POINTER(c_void_p), c_size_t, c_void_p, c_void_p)
_create_result = _function("event_CreateTopics_result", c_void_p, c_void_p)
_result_topics = _function("CreateTopics_result_topics", POINTER(c_void_p), c_void_p, POINTER(c_size_t))
_result_error = _function("topic_result_error", c_int, c_void_p)
_resource_new = _function("ConfigResource_new", c_void_p, c_int, c_char_p)
_resource_set = _function("ConfigResource_set_config", c_int, c_void_p, c_char_p, c_char_p)
_resource_error = _function("ConfigResource_error", c_int, c_void_p)
_resource_destroy = _function("ConfigResource_destroy", None, c_void_p)
_alter_configs = _function("AlterConfigs", None, c_void_p, POINTER(c_void_p), c_size_t, c_void_p, c_void_p)
_alter_result = _function("event_AlterConfigs_result", c_void_p, c_void_p)
_result_resources = _function("AlterConfigs_result_resources", POINTER(c_void_p), c_void_p, POINTER(c_size_t))
_mock_new = _function("mock_cluster_new", c_void_p, c_void_p, c_int)
_mock_destroy = _function("mock_cluster_destroy", None, c_void_p)
_mock_bootstraps = _function("mock_cluster_bootstraps", c_char_p, c_void_p)
_mock_push = _function("mock_push_request_errors_array", None, c_void_p, c_int16, c_size_t, POINTER(c_int))
_mock_clear = _function("mock_clear_request_errors", None, c_void_p, c_int16)
_mock_topic = _function("mock_topic_create", c_int, c_void_p, c_char_p, c_int, c_int)
_mock_leader = _function("mock_partition_set_leader", c_int, c_void_p, c_char_p, c_int32, c_int32)
_mock_down = _function("mock_broker_set_down", c_int, c_void_p, c_int32)
_mock_up = _function("mock_broker_set_up", c_int, c_void_p, c_int32)
_mock_rtt = _function("mock_broker_set_rtt", c_int, c_void_p, c_int32, c_int)


class Failure(RuntimeError):
    def __init__(self, code):
        super().__init__(_err2str(code).decode())
        self.code = code


def _check(error):
    if error:
        raise Failure(error)


class _Client:
    def __init__(self, **properties):
        conf, error = _conf_new(), create_string_buffer(512)
        for name, value in {"log_level": "0", **properties}.items():
            assert _conf_set(conf, (name if name == "log_level" else name.replace("_", ".")).encode(),
                             str(value).encode(), error, len(error)) == 0, error.value
        self.handle = _new(0, conf, error, len(error))
        assert self.handle, error.value

    def close(self):
        _destroy(self.handle)


def version():
    number = _version()
    return number >> 24, number >> 16 & 255, number >> 8 & 255


def create_topic(brokers, name, partitions, replicas=1, **config):
    """Makes the topic, unless it is there; waits for the controller's answer."""
    error = create_string_buffer(512)
    topic = _topic_new(name.encode(), partitions, replicas, error, len(error))
    for key, value in config.items():
        _check(_topic_set(topic, key.replace("_", ".").encode(), str(value).encode()))

    def failure(event):
        code = _result_error(_result_topics(_create_result(event), byref(c_size_t()))[0])
        return 0 if code == TOPIC_ALREADY_EXISTS else code

    try:
        _administer(brokers, _create_topics, topic, failure)
    finally:
        _topic_destroy(topic)


def configure_topic(brokers, name, **config):
    """Gives the topic this configuration and no other."""
    resource = _resource_new(TOPIC_RESOURCE, name.encode())
    for key, value in config.items():
        _check(_resource_set(resource, key.replace("_", ".").encode(), str(value).encode()))
    try:
        _administer(brokers, _alter_configs, resource,
                    lambda event: _resource_error(_result_resources(_alter_result(event), byref(c_size_t()))[0]))
    finally:
        _resource_destroy(resource)


def _administer(brokers, request, what, failure):
    # A client that was told of no controller asks again after minutes; a new one asks at once.
    assert any(_ask(brokers, request, what, failure) for _ in range(12)), "no answer"


def _ask(brokers, request, what, failure):
    """Whether there was an answer."""
    client = _Client(bootstrap_servers=brokers)
    queue = _queue_new(client.handle)
    request(client.handle, byref(c_void_p(what)), 1, None, queue)
    event = _queue_poll(queue, 5_000)
    try:
        if not event:
            return False
        _check(_event_error(event))
        _check(failure(event))
        return True
    finally:
        if event:
            _event_destroy(event)
        _queue_destroy(queue)
        client.close()


class MockCluster:
    """Brokers that live in this process, on real sockets, and fail on command."""

    def __init__(self, brokers=1):
        self.ids = range(1, brokers + 1)
        self._client = _Client()
        self._cluster = _mock_new(self._client.handle, brokers)
        assert self._cluster
        self.brokers = _mock_bootstraps(self._cluster).decode()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        _mock_destroy(self._cluster)
        self._client.close()

    def topic(self, name, partitions=1):
        _check(_mock_topic(self._cluster, name.encode(), partitions, len(self.ids)))

    def leader(self, topic, partition, broker):
        _check(_mock_leader(self._cluster, topic.encode(), partition, broker))

    def answer(self, request, *errors):
        """The next requests of that kind fail so, one after the other; TRANSPORT drops the connection."""
        _mock_push(self._cluster, request, len(errors), (c_int * len(errors))(*errors))

    def answer_as_usual(self, request):
        _mock_clear(self._cluster, request)

    def down(self):
        for broker in self.ids:
            _check(_mock_down(self._cluster, broker))

    def up(self):
        for broker in self.ids:
            _check(_mock_up(self._cluster, broker))

    def delay(self, ms):
        for broker in self.ids:
            _check(_mock_rtt(self._cluster, broker, ms))
