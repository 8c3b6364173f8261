SELECT pgq_orders.place_order(@key@, @digest@, @request@);
