SELECT retrysafe_numbered.place_order(@key@, @digest@, @request@);
