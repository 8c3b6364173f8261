SELECT retrysafe.idem_run(@key@, @request@, 'retrysafe_run.place_order(jsonb)');
