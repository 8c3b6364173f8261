SELECT retrysafe_calls.place_order(@key@, @digest@, @request@);
