SELECT outcome, response FROM retrysafe.idem_begin(@key@, @digest@);
