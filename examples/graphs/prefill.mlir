module @prefill attributes {mhlo.num_partitions = 1 : i32, mhlo.num_replicas = 1 : i32} {
  func.func public @main(%arg0: tensor<32x64xf32>, %arg1: tensor<64xf32>, %arg2: tensor<64x64xf32>, %arg3: tensor<64x64xf32>, %arg4: tensor<64x64xf32>, %arg5: tensor<64x64xf32>, %arg6: tensor<64xf32>, %arg7: tensor<64x160xf32>, %arg8: tensor<64x160xf32>, %arg9: tensor<160x64xf32>) -> (tensor<32x64xf32> {jax.result_info = "result[0]"}, tensor<48x4x16xf32> {jax.result_info = "result[1]"}, tensor<48x4x16xf32> {jax.result_info = "result[2]"}) {
    %cst = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %0 = stablehlo.broadcast_in_dim %cst, dims = [] : (tensor<f32>) -> tensor<48x4x16xf32>
    %1 = stablehlo.iota dim = 0 : tensor<32xi32>
    %2 = stablehlo.multiply %arg0, %arg0 : tensor<32x64xf32>
    %cst_0 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %3 = stablehlo.reduce(%2 init: %cst_0) applies stablehlo.add across dimensions = [1] : (tensor<32x64xf32>, tensor<f32>) -> tensor<32xf32>
    %4 = stablehlo.broadcast_in_dim %3, dims = [0] : (tensor<32xf32>) -> tensor<32x1xf32>
    %cst_1 = stablehlo.constant dense<6.400000e+01> : tensor<f32>
    %5 = stablehlo.broadcast_in_dim %cst_1, dims = [] : (tensor<f32>) -> tensor<32x1xf32>
    %6 = stablehlo.divide %4, %5 : tensor<32x1xf32>
    %cst_2 = stablehlo.constant dense<9.99999997E-7> : tensor<f32>
    %7 = stablehlo.broadcast_in_dim %cst_2, dims = [] : (tensor<f32>) -> tensor<32x1xf32>
    %8 = stablehlo.add %6, %7 : tensor<32x1xf32>
    %9 = stablehlo.rsqrt %8 : tensor<32x1xf32>
    %10 = stablehlo.broadcast_in_dim %9, dims = [0, 1] : (tensor<32x1xf32>) -> tensor<32x64xf32>
    %11 = stablehlo.multiply %arg0, %10 : tensor<32x64xf32>
    %12 = stablehlo.broadcast_in_dim %arg1, dims = [1] : (tensor<64xf32>) -> tensor<1x64xf32>
    %13 = stablehlo.broadcast_in_dim %12, dims = [0, 1] : (tensor<1x64xf32>) -> tensor<32x64xf32>
    %14 = stablehlo.multiply %11, %13 : tensor<32x64xf32>
    %15 = stablehlo.dot_general %14, %arg2, contracting_dims = [1] x [0], precision = [HIGHEST, HIGHEST] : (tensor<32x64xf32>, tensor<64x64xf32>) -> tensor<32x64xf32>
    %16 = stablehlo.reshape %15 : (tensor<32x64xf32>) -> tensor<32x4x16xf32>
    %17 = stablehlo.iota dim = 0 : tensor<8xf32>
    %cst_3 = stablehlo.constant dense<8.000000e+00> : tensor<f32>
    %18 = stablehlo.broadcast_in_dim %cst_3, dims = [] : (tensor<f32>) -> tensor<8xf32>
    %19 = stablehlo.divide %17, %18 : tensor<8xf32>
    %cst_4 = stablehlo.constant dense<1.000000e+04> : tensor<f32>
    %20 = stablehlo.broadcast_in_dim %cst_4, dims = [] : (tensor<f32>) -> tensor<8xf32>
    %21 = stablehlo.power %20, %19 : tensor<8xf32>
    %cst_5 = stablehlo.constant dense<1.000000e+00> : tensor<f32>
    %22 = stablehlo.broadcast_in_dim %cst_5, dims = [] : (tensor<f32>) -> tensor<8xf32>
    %23 = stablehlo.divide %22, %21 : tensor<8xf32>
    %24 = stablehlo.convert %1 : (tensor<32xi32>) -> tensor<32xf32>
    %25 = stablehlo.broadcast_in_dim %24, dims = [0] : (tensor<32xf32>) -> tensor<32x1x1xf32>
    %26 = stablehlo.broadcast_in_dim %23, dims = [2] : (tensor<8xf32>) -> tensor<1x1x8xf32>
    %27 = stablehlo.broadcast_in_dim %25, dims = [0, 1, 2] : (tensor<32x1x1xf32>) -> tensor<32x1x8xf32>
    %28 = stablehlo.broadcast_in_dim %26, dims = [0, 1, 2] : (tensor<1x1x8xf32>) -> tensor<32x1x8xf32>
    %29 = stablehlo.multiply %27, %28 : tensor<32x1x8xf32>
    %30 = stablehlo.cosine %29 : tensor<32x1x8xf32>
    %31 = stablehlo.sine %29 : tensor<32x1x8xf32>
    %32 = stablehlo.slice %16 [0:32, 0:4, 0:8] : (tensor<32x4x16xf32>) -> tensor<32x4x8xf32>
    %33 = stablehlo.slice %16 [0:32, 0:4, 8:16] : (tensor<32x4x16xf32>) -> tensor<32x4x8xf32>
    %34 = stablehlo.broadcast_in_dim %30, dims = [0, 1, 2] : (tensor<32x1x8xf32>) -> tensor<32x4x8xf32>
    %35 = stablehlo.multiply %32, %34 : tensor<32x4x8xf32>
    %36 = stablehlo.broadcast_in_dim %31, dims = [0, 1, 2] : (tensor<32x1x8xf32>) -> tensor<32x4x8xf32>
    %37 = stablehlo.multiply %33, %36 : tensor<32x4x8xf32>
    %38 = stablehlo.subtract %35, %37 : tensor<32x4x8xf32>
    %39 = stablehlo.broadcast_in_dim %30, dims = [0, 1, 2] : (tensor<32x1x8xf32>) -> tensor<32x4x8xf32>
    %40 = stablehlo.multiply %33, %39 : tensor<32x4x8xf32>
    %41 = stablehlo.broadcast_in_dim %31, dims = [0, 1, 2] : (tensor<32x1x8xf32>) -> tensor<32x4x8xf32>
    %42 = stablehlo.multiply %32, %41 : tensor<32x4x8xf32>
    %43 = stablehlo.add %40, %42 : tensor<32x4x8xf32>
    %44 = stablehlo.concatenate %38, %43, dim = 2 : (tensor<32x4x8xf32>, tensor<32x4x8xf32>) -> tensor<32x4x16xf32>
    %45 = stablehlo.dot_general %14, %arg3, contracting_dims = [1] x [0], precision = [HIGHEST, HIGHEST] : (tensor<32x64xf32>, tensor<64x64xf32>) -> tensor<32x64xf32>
    %46 = stablehlo.reshape %45 : (tensor<32x64xf32>) -> tensor<32x4x16xf32>
    %47 = stablehlo.iota dim = 0 : tensor<8xf32>
    %cst_6 = stablehlo.constant dense<8.000000e+00> : tensor<f32>
    %48 = stablehlo.broadcast_in_dim %cst_6, dims = [] : (tensor<f32>) -> tensor<8xf32>
    %49 = stablehlo.divide %47, %48 : tensor<8xf32>
    %cst_7 = stablehlo.constant dense<1.000000e+04> : tensor<f32>
    %50 = stablehlo.broadcast_in_dim %cst_7, dims = [] : (tensor<f32>) -> tensor<8xf32>
    %51 = stablehlo.power %50, %49 : tensor<8xf32>
    %cst_8 = stablehlo.constant dense<1.000000e+00> : tensor<f32>
    %52 = stablehlo.broadcast_in_dim %cst_8, dims = [] : (tensor<f32>) -> tensor<8xf32>
    %53 = stablehlo.divide %52, %51 : tensor<8xf32>
    %54 = stablehlo.convert %1 : (tensor<32xi32>) -> tensor<32xf32>
    %55 = stablehlo.broadcast_in_dim %54, dims = [0] : (tensor<32xf32>) -> tensor<32x1x1xf32>
    %56 = stablehlo.broadcast_in_dim %53, dims = [2] : (tensor<8xf32>) -> tensor<1x1x8xf32>
    %57 = stablehlo.broadcast_in_dim %55, dims = [0, 1, 2] : (tensor<32x1x1xf32>) -> tensor<32x1x8xf32>
    %58 = stablehlo.broadcast_in_dim %56, dims = [0, 1, 2] : (tensor<1x1x8xf32>) -> tensor<32x1x8xf32>
    %59 = stablehlo.multiply %57, %58 : tensor<32x1x8xf32>
    %60 = stablehlo.cosine %59 : tensor<32x1x8xf32>
    %61 = stablehlo.sine %59 : tensor<32x1x8xf32>
    %62 = stablehlo.slice %46 [0:32, 0:4, 0:8] : (tensor<32x4x16xf32>) -> tensor<32x4x8xf32>
    %63 = stablehlo.slice %46 [0:32, 0:4, 8:16] : (tensor<32x4x16xf32>) -> tensor<32x4x8xf32>
    %64 = stablehlo.broadcast_in_dim %60, dims = [0, 1, 2] : (tensor<32x1x8xf32>) -> tensor<32x4x8xf32>
    %65 = stablehlo.multiply %62, %64 : tensor<32x4x8xf32>
    %66 = stablehlo.broadcast_in_dim %61, dims = [0, 1, 2] : (tensor<32x1x8xf32>) -> tensor<32x4x8xf32>
    %67 = stablehlo.multiply %63, %66 : tensor<32x4x8xf32>
    %68 = stablehlo.subtract %65, %67 : tensor<32x4x8xf32>
    %69 = stablehlo.broadcast_in_dim %60, dims = [0, 1, 2] : (tensor<32x1x8xf32>) -> tensor<32x4x8xf32>
    %70 = stablehlo.multiply %63, %69 : tensor<32x4x8xf32>
    %71 = stablehlo.broadcast_in_dim %61, dims = [0, 1, 2] : (tensor<32x1x8xf32>) -> tensor<32x4x8xf32>
    %72 = stablehlo.multiply %62, %71 : tensor<32x4x8xf32>
    %73 = stablehlo.add %70, %72 : tensor<32x4x8xf32>
    %74 = stablehlo.concatenate %68, %73, dim = 2 : (tensor<32x4x8xf32>, tensor<32x4x8xf32>) -> tensor<32x4x16xf32>
    %75 = stablehlo.dot_general %14, %arg4, contracting_dims = [1] x [0], precision = [HIGHEST, HIGHEST] : (tensor<32x64xf32>, tensor<64x64xf32>) -> tensor<32x64xf32>
    %76 = stablehlo.reshape %75 : (tensor<32x64xf32>) -> tensor<32x4x16xf32>
    %c = stablehlo.constant dense<0> : tensor<i32>
    %c_9 = stablehlo.constant dense<0> : tensor<i32>
    %77 = stablehlo.compare LT, %c, %c_9, SIGNED : (tensor<i32>, tensor<i32>) -> tensor<i1>
    %c_10 = stablehlo.constant dense<0> : tensor<i32>
    %c_11 = stablehlo.constant dense<48> : tensor<i32>
    %78 = stablehlo.add %c_10, %c_11 : tensor<i32>
    %c_12 = stablehlo.constant dense<0> : tensor<i32>
    %79 = stablehlo.select %77, %78, %c_12 : tensor<i1>, tensor<i32>
    %c_13 = stablehlo.constant dense<0> : tensor<i32>
    %c_14 = stablehlo.constant dense<0> : tensor<i32>
    %80 = stablehlo.compare LT, %c_13, %c_14, SIGNED : (tensor<i32>, tensor<i32>) -> tensor<i1>
    %c_15 = stablehlo.constant dense<0> : tensor<i32>
    %c_16 = stablehlo.constant dense<4> : tensor<i32>
    %81 = stablehlo.add %c_15, %c_16 : tensor<i32>
    %c_17 = stablehlo.constant dense<0> : tensor<i32>
    %82 = stablehlo.select %80, %81, %c_17 : tensor<i1>, tensor<i32>
    %c_18 = stablehlo.constant dense<0> : tensor<i32>
    %c_19 = stablehlo.constant dense<0> : tensor<i32>
    %83 = stablehlo.compare LT, %c_18, %c_19, SIGNED : (tensor<i32>, tensor<i32>) -> tensor<i1>
    %c_20 = stablehlo.constant dense<0> : tensor<i32>
    %c_21 = stablehlo.constant dense<16> : tensor<i32>
    %84 = stablehlo.add %c_20, %c_21 : tensor<i32>
    %c_22 = stablehlo.constant dense<0> : tensor<i32>
    %85 = stablehlo.select %83, %84, %c_22 : tensor<i1>, tensor<i32>
    %86 = stablehlo.dynamic_update_slice %0, %74, %79, %82, %85 : (tensor<48x4x16xf32>, tensor<32x4x16xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<48x4x16xf32>
    %c_23 = stablehlo.constant dense<0> : tensor<i32>
    %c_24 = stablehlo.constant dense<0> : tensor<i32>
    %87 = stablehlo.compare LT, %c_23, %c_24, SIGNED : (tensor<i32>, tensor<i32>) -> tensor<i1>
    %c_25 = stablehlo.constant dense<0> : tensor<i32>
    %c_26 = stablehlo.constant dense<48> : tensor<i32>
    %88 = stablehlo.add %c_25, %c_26 : tensor<i32>
    %c_27 = stablehlo.constant dense<0> : tensor<i32>
    %89 = stablehlo.select %87, %88, %c_27 : tensor<i1>, tensor<i32>
    %c_28 = stablehlo.constant dense<0> : tensor<i32>
    %c_29 = stablehlo.constant dense<0> : tensor<i32>
    %90 = stablehlo.compare LT, %c_28, %c_29, SIGNED : (tensor<i32>, tensor<i32>) -> tensor<i1>
    %c_30 = stablehlo.constant dense<0> : tensor<i32>
    %c_31 = stablehlo.constant dense<4> : tensor<i32>
    %91 = stablehlo.add %c_30, %c_31 : tensor<i32>
    %c_32 = stablehlo.constant dense<0> : tensor<i32>
    %92 = stablehlo.select %90, %91, %c_32 : tensor<i1>, tensor<i32>
    %c_33 = stablehlo.constant dense<0> : tensor<i32>
    %c_34 = stablehlo.constant dense<0> : tensor<i32>
    %93 = stablehlo.compare LT, %c_33, %c_34, SIGNED : (tensor<i32>, tensor<i32>) -> tensor<i1>
    %c_35 = stablehlo.constant dense<0> : tensor<i32>
    %c_36 = stablehlo.constant dense<16> : tensor<i32>
    %94 = stablehlo.add %c_35, %c_36 : tensor<i32>
    %c_37 = stablehlo.constant dense<0> : tensor<i32>
    %95 = stablehlo.select %93, %94, %c_37 : tensor<i1>, tensor<i32>
    %96 = stablehlo.dynamic_update_slice %0, %76, %89, %92, %95 : (tensor<48x4x16xf32>, tensor<32x4x16xf32>, tensor<i32>, tensor<i32>, tensor<i32>) -> tensor<48x4x16xf32>
    %97 = stablehlo.dot_general %44, %86, batching_dims = [1] x [1], contracting_dims = [2] x [2], precision = [HIGHEST, HIGHEST] : (tensor<32x4x16xf32>, tensor<48x4x16xf32>) -> tensor<4x32x48xf32>
    %cst_38 = stablehlo.constant dense<4.000000e+00> : tensor<f32>
    %98 = stablehlo.broadcast_in_dim %cst_38, dims = [] : (tensor<f32>) -> tensor<4x32x48xf32>
    %99 = stablehlo.divide %97, %98 : tensor<4x32x48xf32>
    %100 = stablehlo.iota dim = 0 : tensor<48xi32>
    %101 = stablehlo.broadcast_in_dim %100, dims = [1] : (tensor<48xi32>) -> tensor<1x48xi32>
    %102 = stablehlo.broadcast_in_dim %1, dims = [0] : (tensor<32xi32>) -> tensor<32x1xi32>
    %103 = stablehlo.broadcast_in_dim %101, dims = [0, 1] : (tensor<1x48xi32>) -> tensor<32x48xi32>
    %104 = stablehlo.broadcast_in_dim %102, dims = [0, 1] : (tensor<32x1xi32>) -> tensor<32x48xi32>
    %105 = stablehlo.compare LE, %103, %104, SIGNED : (tensor<32x48xi32>, tensor<32x48xi32>) -> tensor<32x48xi1>
    %106 = stablehlo.broadcast_in_dim %105, dims = [1, 2] : (tensor<32x48xi1>) -> tensor<1x32x48xi1>
    %cst_39 = stablehlo.constant dense<-1.000000e+09> : tensor<f32>
    %107 = call @_where(%106, %99, %cst_39) : (tensor<1x32x48xi1>, tensor<4x32x48xf32>, tensor<f32>) -> tensor<4x32x48xf32>
    %cst_40 = stablehlo.constant dense<0xFF800000> : tensor<f32>
    %108 = stablehlo.reduce(%107 init: %cst_40) applies stablehlo.maximum across dimensions = [2] : (tensor<4x32x48xf32>, tensor<f32>) -> tensor<4x32xf32>
    %cst_41 = stablehlo.constant dense<0xFF800000> : tensor<f32>
    %109 = stablehlo.broadcast_in_dim %cst_41, dims = [] : (tensor<f32>) -> tensor<4x32xf32>
    %110 = stablehlo.maximum %109, %108 : tensor<4x32xf32>
    %111 = stablehlo.broadcast_in_dim %110, dims = [0, 1] : (tensor<4x32xf32>) -> tensor<4x32x1xf32>
    %112 = stablehlo.broadcast_in_dim %111, dims = [0, 1, 2] : (tensor<4x32x1xf32>) -> tensor<4x32x48xf32>
    %113 = stablehlo.subtract %107, %112 : tensor<4x32x48xf32>
    %114 = stablehlo.exponential %113 : tensor<4x32x48xf32>
    %cst_42 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %115 = stablehlo.reduce(%114 init: %cst_42) applies stablehlo.add across dimensions = [2] : (tensor<4x32x48xf32>, tensor<f32>) -> tensor<4x32xf32>
    %116 = stablehlo.broadcast_in_dim %115, dims = [0, 1] : (tensor<4x32xf32>) -> tensor<4x32x1xf32>
    %117 = stablehlo.broadcast_in_dim %116, dims = [0, 1, 2] : (tensor<4x32x1xf32>) -> tensor<4x32x48xf32>
    %118 = stablehlo.divide %114, %117 : tensor<4x32x48xf32>
    %119 = stablehlo.dot_general %96, %118, batching_dims = [1] x [0], contracting_dims = [0] x [2], precision = [HIGHEST, HIGHEST] : (tensor<48x4x16xf32>, tensor<4x32x48xf32>) -> tensor<4x16x32xf32>
    %120 = stablehlo.transpose %119, dims = [2, 0, 1] : (tensor<4x16x32xf32>) -> tensor<32x4x16xf32>
    %121 = stablehlo.reshape %120 : (tensor<32x4x16xf32>) -> tensor<32x64xf32>
    %122 = stablehlo.dot_general %121, %arg5, contracting_dims = [1] x [0], precision = [HIGHEST, HIGHEST] : (tensor<32x64xf32>, tensor<64x64xf32>) -> tensor<32x64xf32>
    %123 = stablehlo.add %arg0, %122 : tensor<32x64xf32>
    %124 = stablehlo.multiply %123, %123 : tensor<32x64xf32>
    %cst_43 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %125 = stablehlo.reduce(%124 init: %cst_43) applies stablehlo.add across dimensions = [1] : (tensor<32x64xf32>, tensor<f32>) -> tensor<32xf32>
    %126 = stablehlo.broadcast_in_dim %125, dims = [0] : (tensor<32xf32>) -> tensor<32x1xf32>
    %cst_44 = stablehlo.constant dense<6.400000e+01> : tensor<f32>
    %127 = stablehlo.broadcast_in_dim %cst_44, dims = [] : (tensor<f32>) -> tensor<32x1xf32>
    %128 = stablehlo.divide %126, %127 : tensor<32x1xf32>
    %cst_45 = stablehlo.constant dense<9.99999997E-7> : tensor<f32>
    %129 = stablehlo.broadcast_in_dim %cst_45, dims = [] : (tensor<f32>) -> tensor<32x1xf32>
    %130 = stablehlo.add %128, %129 : tensor<32x1xf32>
    %131 = stablehlo.rsqrt %130 : tensor<32x1xf32>
    %132 = stablehlo.broadcast_in_dim %131, dims = [0, 1] : (tensor<32x1xf32>) -> tensor<32x64xf32>
    %133 = stablehlo.multiply %123, %132 : tensor<32x64xf32>
    %134 = stablehlo.broadcast_in_dim %arg6, dims = [1] : (tensor<64xf32>) -> tensor<1x64xf32>
    %135 = stablehlo.broadcast_in_dim %134, dims = [0, 1] : (tensor<1x64xf32>) -> tensor<32x64xf32>
    %136 = stablehlo.multiply %133, %135 : tensor<32x64xf32>
    %137 = stablehlo.dot_general %136, %arg7, contracting_dims = [1] x [0], precision = [HIGHEST, HIGHEST] : (tensor<32x64xf32>, tensor<64x160xf32>) -> tensor<32x160xf32>
    %138 = call @silu(%137) : (tensor<32x160xf32>) -> tensor<32x160xf32>
    %139 = stablehlo.dot_general %136, %arg8, contracting_dims = [1] x [0], precision = [HIGHEST, HIGHEST] : (tensor<32x64xf32>, tensor<64x160xf32>) -> tensor<32x160xf32>
    %140 = stablehlo.multiply %138, %139 : tensor<32x160xf32>
    %141 = stablehlo.dot_general %140, %arg9, contracting_dims = [1] x [0], precision = [HIGHEST, HIGHEST] : (tensor<32x160xf32>, tensor<160x64xf32>) -> tensor<32x64xf32>
    %142 = stablehlo.add %123, %141 : tensor<32x64xf32>
    return %142, %86, %96 : tensor<32x64xf32>, tensor<48x4x16xf32>, tensor<48x4x16xf32>
  }
  func.func private @_where(%arg0: tensor<1x32x48xi1>, %arg1: tensor<4x32x48xf32>, %arg2: tensor<f32>) -> tensor<4x32x48xf32> {
    %0 = stablehlo.broadcast_in_dim %arg0, dims = [0, 1, 2] : (tensor<1x32x48xi1>) -> tensor<4x32x48xi1>
    %1 = stablehlo.broadcast_in_dim %arg2, dims = [] : (tensor<f32>) -> tensor<4x32x48xf32>
    %2 = stablehlo.select %0, %arg1, %1 : tensor<4x32x48xi1>, tensor<4x32x48xf32>
    return %2 : tensor<4x32x48xf32>
  }
  func.func private @silu(%arg0: tensor<32x160xf32>) -> tensor<32x160xf32> {
    %0 = stablehlo.negate %arg0 : tensor<32x160xf32>
    %1 = stablehlo.exponential %0 : tensor<32x160xf32>
    %cst = stablehlo.constant dense<1.000000e+00> : tensor<f32>
    %2 = stablehlo.broadcast_in_dim %cst, dims = [] : (tensor<f32>) -> tensor<32x160xf32>
    %3 = stablehlo.add %2, %1 : tensor<32x160xf32>
    %cst_0 = stablehlo.constant dense<1.000000e+00> : tensor<f32>
    %4 = stablehlo.broadcast_in_dim %cst_0, dims = [] : (tensor<f32>) -> tensor<32x160xf32>
    %5 = stablehlo.divide %4, %3 : tensor<32x160xf32>
    %6 = stablehlo.multiply %arg0, %5 : tensor<32x160xf32>
    return %6 : tensor<32x160xf32>
  }
}
