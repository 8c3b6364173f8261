SELECT retrysafe.outbox_register_kind('null', 'retrysafe_null', '[{"name": "parallel", "type": "integer"}]');
